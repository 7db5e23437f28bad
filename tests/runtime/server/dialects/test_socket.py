"""OpenAI's WebSocket mode: frames in, events out, and the guards of HTTP around every frame."""

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from doubles.listening import listening
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from llmc.runtime.observe.logs import fields_of
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects import socket as sockets
from llmc.runtime.server.dialects.socket import Sockets
from llmc.runtime.server.http.guarded import MOST_FRAMES, Guarded, SocketProtocol, uvicorn_options
from llmc.runtime.server.http.logs import RequestLog
from llmc.runtime.server.http.streams import event

WAIT_S = 30.0  # for what happens at once, on a machine that does much else
ROUTE = "/v1/responses"
KEY = "sk-0123456789abcdef"
# The openai package asks for an older websockets than the one here, which warns of its use.
pytestmark = pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")


class Scripted:
    """An application that answers with the events of a response that says ``Hello``.

    Inputs that do otherwise: ``wait``, until the gate is open; ``break``, without an end; ``refuse``, no stream.

    Attributes:
        bodies: of the requests that came.
        gone: requests whose client left while they waited.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gone = 0
        self.line_end = b"\n"
        self.piece = 1 << 20

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        if _last(body) == "refuse":
            head = {"type": "http.response.start", "status": 404, "headers": []}
            await send(head)
            await send({"type": "http.response.body", "body": b'{"error": {"code": "response_not_found"}}'})
            return
        headers = [(b"content-type", b"text/event-stream"), (b"x-llmc-ignored", b"user"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        number = len(self.bodies)
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"Hello {number}"}]}
        response = {
            "id": f"resp_{number}",
            "store": body.get("store", True),
            "output": [],
            "usage": {"input_tokens": 3},
        }
        await self.say(send, "response.created", response=response)
        if _last(body) == "wait" and not await self.is_open(receive):
            self.gone += 1
            return
        if _last(body) == "break":
            raise KeyError("planted")
        await self.say(send, "response.output_text.delta", delta="Hello")
        await self.say(send, "response.incomplete", response={**response, "status": "incomplete", "output": [item]})
        await send({"type": "http.response.body", "body": b""})

    async def is_open(self, receive: Any) -> bool:
        gone = asyncio.ensure_future(receive())
        while not self.gate.is_set() and not gone.done():
            await asyncio.sleep(0.005)
        gone.cancel()
        return self.gate.is_set()

    async def say(self, send: Any, kind: str, **rest: Any) -> None:
        data = event({"type": kind, **rest}, kind).replace(b"\n", self.line_end)
        for start in range(0, len(data), self.piece):
            await send({"type": "http.response.body", "body": data[start : start + self.piece], "more_body": True})


def _last(body: dict[str, Any]) -> Any:
    given = body["input"]
    return given[-1]["content"] if isinstance(given, list) else given


class Service:
    """The application behind its guards. Attributes: app: the innermost; url, base: its address."""

    def __init__(self, app: Scripted, guarded: Guarded, address: tuple[str, int]) -> None:
        self.app, self.guarded, self.address = app, guarded, address
        self.url, self.base = (f"{scheme}://{address[0]}:{address[1]}" for scheme in ("ws", "http"))

    def connect(self, path: str = "", **options: Any) -> ClientConnection:
        return connect(self.url + ROUTE + path, max_size=None, compression=None, open_timeout=WAIT_S, **options)


@contextmanager
def served(**settings: Any) -> Iterator[Service]:
    config, app = ServerConfig(**settings), Scripted()
    guarded = Guarded(app, config)
    around = Sockets(RequestLog(guarded), config)
    with listening(around, **uvicorn_options(config)) as address:
        yield Service(app, guarded, address)


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with served(max_body_bytes=100_000) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Service:
    shared.app.__init__()  # type: ignore[misc]
    return shared


def create(given: Any = "Hi", **rest: Any) -> str:
    return json.dumps({"type": "response.create", "input": given, **rest})


def get(client: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.recv(timeout=WAIT_S))
    return found


def answer(client: ClientConnection) -> list[dict[str, Any]]:
    """The events up to the last one of an answer."""
    found = [get(client)]
    while found[-1]["type"] not in (*sockets.ENDS, "error"):
        found.append(get(client))
    return found


def closing_code(client: ClientConnection) -> int:
    """The code with which the server closes a connection; what comes before it is left out."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class TestAnswers:
    def test_are_the_events_of_the_stream(self, service):
        with service.connect() as client:
            client.send(create(model="m", stream_id="main", stream=False))
            created, delta, last = answer(client)
        assert service.app.bodies == [{"input": "Hi", "model": "m", "stream": True}]
        assert (created["type"], delta["delta"], last["response"]["status"]) == (
            "response.created",
            "Hello",
            "incomplete",
        )
        assert {one["stream_id"] for one in (created, delta, last)} == {"main"}
        assert created["headers"].pop("x-request-id").startswith("req_")
        assert created["headers"] == {"x-llmc-ignored": "user"}

    @pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
    def test_of_an_upstream_may_come_in_any_pieces(self, service, line_end):
        service.app.line_end, service.app.piece = line_end, 7
        with service.connect() as client:
            client.send(create())
            assert [one["type"] for one in answer(client)][1:] == ["response.output_text.delta", "response.incomplete"]

    def test_of_one_stream_come_in_order_and_of_others_meanwhile(self, service):
        with service.connect() as client:
            for given, stream in (("wait", None), ("Hi", None), ("wait", "a"), ("Hi", "b")):
                client.send(create(given, stream_id=stream))
            first = [get(client) for _ in range(5)]
            assert sorted(str(one.get("stream_id")) for one in first) == ["None", "a", "b", "b", "b"]
            service.app.gate.set()
            rest = [get(client) for _ in range(7)]
        assert [one["response"]["id"] for one in rest if "response" in one and "stream_id" not in one] == [
            "resp_1",
            "resp_4",
            "resp_4",
        ]

    def test_that_break_off_end_with_an_error(self, service):
        with service.connect() as client:
            client.send(create("break", stream_id="a"))
            last = answer(client)[-1]
            assert (last["status"], last["error"]["type"], last["stream_id"]) == (500, "server_error", "a")
            client.send(create())
            assert answer(client)[-1]["type"] == "response.incomplete"

    def test_whose_client_leaves_are_cancelled_and_those_after_them_never_begin(self, service):
        with service.connect() as client:
            client.send(create("wait"))
            client.send(create("wait"))
            assert get(client)["type"] == "response.created"
        until(lambda: service.app.gone)
        time.sleep(0.05)
        assert len(service.app.bodies) == 1

    def test_that_say_nothing_prepare_the_next_one(self, service):
        with service.connect() as client:
            for asked in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
                client.send(create(max_output_tokens=9, **asked))
                created, last = answer(client)
                assert created["response"]["max_output_tokens"] == 9 == last["response"]["max_output_tokens"]
                assert (last["type"], last["response"]["output"]) == ("response.completed", [])
                assert last["response"]["usage"] == {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3}
            assert service.app.bodies[0] == {"input": "Hi", "stream": True, "store": False, "max_output_tokens": 1}
            client.send(create([], previous_response_id=last["response"]["id"]))
            assert answer(client)[-1]["response"]["previous_response_id"] == last["response"]["id"]
        assert service.app.bodies[-1]["input"] == [{"role": "user", "content": "Hi"}]


class TestConversations:
    def test_go_on_without_a_store_on_their_own_connection(self, service):
        with service.connect() as client, service.connect() as other:
            client.send(create("One", store=False))
            first = answer(client)[-1]["response"]
            client.send(create([{"role": "user", "content": "Two"}], store=False, previous_response_id=first["id"]))
            second = answer(client)[-1]["response"]
            for one in (client, other):
                one.send(create("Three", store=False, previous_response_id=second["id"], stream_id="fork"))
                assert answer(one)[-1]["response"]["previous_response_id"] == second["id"]
        turns = [{"role": "user", "content": text} for text in ("One", "Two", "Three")]
        said = [first["output"][0], second["output"][0]]
        assert second["previous_response_id"] == first["id"]
        known, unknown = service.app.bodies[2:]
        assert (known["input"], known["previous_response_id"]) == (
            [turns[0], said[0], turns[1], said[1], turns[2]],
            None,
        )
        assert (unknown["input"], unknown["previous_response_id"]) == (turns[2:], second["id"])

    def test_go_on_from_what_is_stored(self, service):
        with service.connect() as client:
            client.send(create("One"))
            stored = answer(client)[-1]["response"]
            client.send(create("Two", store=False, previous_response_id=stored["id"]))
            second = answer(client)[-1]["response"]
            client.send(create("Three", previous_response_id=second["id"]))
            answer(client)
        assert [body.get("previous_response_id") for body in service.app.bodies] == [None, stored["id"], stored["id"]]
        assert len(service.app.bodies[2]["input"]) == 3

    def test_that_are_nowhere_are_refused_in_openais_words(self, service):
        with service.connect() as client:
            client.send(create("refuse", previous_response_id="resp_0"))
            (refused,) = answer(client)
        error = refused["error"]
        assert (refused["status"], error["code"]) == (400, "previous_response_not_found")
        assert (error["param"], error["type"]) == ("previous_response_id", "invalid_request_error")

    def test_are_forgotten_with_their_connection(self, monkeypatch):
        config, app = ServerConfig(), Scripted()
        around = Sockets(app, config)
        with listening(around, **uvicorn_options(config)) as address:
            with pytest.raises(InvalidStatus):  # nothing here accepts a handshake without guards
                Service(app, None, address).connect()  # type: ignore[arg-type]
            around.app = Guarded(app, config)
            with Service(app, around.app, address).connect() as client:
                client.send(create("One", store=False))
                answer(client)
                assert around.memory.bytes
            until(lambda: not around.memory.bytes)


GARBAGE: dict[str, tuple[str | bytes, str]] = {
    "text": ("no JSON", "is no JSON object"),
    "binary": (b"\xff\xfe", "is no JSON object"),
    "a list": ("[]", "is no JSON object"),
    "a number": ("1", "is no JSON object"),
    "nothing": ("", "is no JSON object"),
    "no type": ("{}", "type is missing, expected response.create"),
    "another type": ('{"type": "response.cancel"}', "type is 'response.cancel', expected response.create"),
    "a type that is none": ('{"type": []}', "expected response.create"),
    "depth": ('{"a": ' + "[" * 70 + "]" * 70 + "}", "64 levels"),
    "a zero byte": ('{"a": "\0"}', "zero byte"),
    "a name twice": ('{"type": "response.create", "type": 1}', "type is given twice"),
    "half a character": ('{"type": "\\ud800"}', "half of a character"),
    "an empty stream": (create(stream_id=""), "stream_id is ''"),
    "a stream that is none": (create(stream_id={}), "stream_id is"),
    "a stream with spaces": (create(stream_id="a b"), "stream_id is 'a b'"),
    "a stream that is long": (create(stream_id="a" * 257), "stream_id is"),
    "generate": (create(generate="no"), "generate is 'no', expected true or false"),
}


class TestFrames:
    @pytest.mark.threat("websocket")
    @pytest.mark.parametrize("name", GARBAGE)
    def test_that_are_garbage_are_refused_and_those_after_them_answered(self, service, name):
        frame, said = GARBAGE[name]
        with service.connect() as client:
            client.send(frame)
            (refused,) = answer(client)
            assert (refused["type"], refused["status"]) == ("error", 400) and said in refused["error"]["message"]
            client.send(create().encode())
            assert answer(client)[-1]["type"] == "response.incomplete"
        assert len(service.app.bodies) == 1

    def test_in_text_that_is_none_end_the_connection(self, service, caplog):
        with service.connect() as client:
            client.send(b"\xff", text=True)
            assert closing_code(client) == 1007
        assert "UTF-8" not in caplog.text

    @pytest.mark.threat("websocket")
    @pytest.mark.parametrize("parts", [1, 10])
    def test_larger_than_a_body_end_the_connection(self, service, parts):
        with service.connect() as client:
            client.send("a" * 101_000 if parts == 1 else ["a" * 11_000] * parts)
            assert closing_code(client) == 1009

    @pytest.mark.threat("websocket")
    @pytest.mark.parametrize(
        "frame", [b"\x89\x80\0\0\0\0", b"\x01\x80\0\0\0\0" + b"\0\x80\0\0\0\0" * 9], ids=["pings", "parts"]
    )
    def test_without_end_and_without_content_end_the_connection(self, service, frame):
        with service.connect() as client:
            client.socket.sendall(frame[:6] + frame[-6:] * (MOST_FRAMES * 4))
            assert closing_code(client) == 1008

    def test_beyond_those_that_may_wait_are_refused(self, service):
        with service.connect() as client:
            for _ in range(sockets.MOST_UNANSWERED):
                client.send(create("wait"))
            client.send(create("one more"))
            refused = next(one for one in (get(client), get(client)) if one["type"] == "error")
            assert (refused["status"], refused["error"]["code"]) == (429, "queue_full")
            assert refused["error"]["headers"] == {"retry-after": "1"}
            service.app.gate.set()
            assert sum(answer(client)[-1]["type"] != "error" for _ in range(64)) == 64

    @pytest.mark.threat("websocket")
    def test_that_wait_have_as_many_bytes_as_one_body(self, service):
        with service.connect() as client:
            for given in ("wait", "a" * 60_000, "a" * 60_000):
                client.send(create(given))
            refused = next(one for one in (get(client), get(client)) if one["type"] == "error")
            assert refused["error"]["code"] == "queue_full" and "60" in refused["error"]["message"]

    def test_of_more_streams_than_a_connection_may_have_are_refused(self, service):
        with service.connect() as client:
            for number in range(sockets.MOST_STREAMS + 1):
                client.send(create(stream_id=f"s-{number}"))
                last = answer(client)[-1]
            assert (last["stream_id"], last["error"]["code"]) == ("s-32", "websocket_stream_limit_reached")
            for stream in (None, "s-0"):
                client.send(create(stream_id=stream))
                assert answer(client)[-1]["type"] == "response.incomplete"

    def test_that_steer_get_their_input_back(self, service):
        with service.connect() as client:
            client.send(json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop."}))
            failed = get(client)
        assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
        assert failed["steer"] == {"previous_response_id": "resp_1", "input": "Stop."}


class TestGuards:
    @pytest.mark.threat("websocket")
    @pytest.mark.parametrize(
        ("name", "value", "status", "code"),
        [("Origin", "https://evil.example", 403, "foreign_origin"), ("Host", "evil.example", 400, "unknown_host")],
    )
    def test_refuse_foreign_pages_in_the_handshake(self, service, name, value, status, code):
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        with closing(http.client.HTTPConnection(*service.address, timeout=WAIT_S)) as client:
            client.request("GET", ROUTE, headers={**offer, "Sec-WebSocket-Key": "a" * 22 + "==", name: value})
            refused = client.getresponse()
            assert (refused.status, json.loads(refused.read())["error"]["code"]) == (status, code)

    def test_let_pages_of_the_settings_in(self):
        with served(cors_origins=("https://mine.example",)) as service:
            with service.connect(origin="https://mine.example") as client:
                client.send(create())
                assert answer(client)[-1]["type"] == "response.incomplete"

    @pytest.mark.threat("websocket")
    def test_ask_for_a_key_at_the_handshake_and_at_each_frame(self, tmp_path):
        keys = tmp_path / "keys.toml"

        def write(name: str) -> None:
            keys.write_text(f'[{name}]\nkey = "{KEY if name == "ann" else KEY[::-1]}"\nrequests_per_minute = 3\n')
            keys.chmod(0o600)

        write("ann")
        with served(keys_file=keys) as service:
            for headers in ({}, {"Authorization": "Bearer sk-wrong-0123456789"}):
                with pytest.raises(InvalidStatus) as refused:
                    service.connect(additional_headers=headers)
                assert refused.value.response.status_code == 401
            with service.connect(additional_headers={"Authorization": f"Bearer {KEY}"}) as client:
                for _ in range(3):
                    client.send(create())
                    created, *_, last = answer(client)
                    assert last["type"] == "response.incomplete"
                assert created["headers"]["x-ratelimit-remaining-requests"] == "0"
                client.send(create())
                (refused_frame,) = answer(client)
                assert refused_frame["status"] == 429 and int(refused_frame["error"]["headers"]["retry-after"]) > 0
                write("ben")
                service.guarded.reload()
                client.send(create())
                (withdrawn,) = answer(client)
                assert (withdrawn["status"], withdrawn["error"]["code"]) == (401, "invalid_api_key")
                assert closing_code(client) == 1008

    @pytest.mark.threat("websocket")
    def test_count_connections(self):
        with served(max_connections=3) as service, ExitStack() as crowd:
            for _ in range(2):
                crowd.enter_context(service.connect())
            with pytest.raises(InvalidStatus) as refused:
                service.connect()
            assert refused.value.response.status_code == 503

    def test_log_each_frame_as_a_request_and_nothing_else(self, service, caplog):
        with caplog.at_level(logging.INFO), service.connect("?secret=1") as client:
            client.send(create())
            answer(client)
        lines = [fields_of(record) for record in caplog.records if record.getMessage() == "request"]
        assert [(line["method"], line["status"]) for line in lines] == [("GET", 101), ("POST", 200)]
        assert lines[0]["route"] == ROUTE and "secret" not in caplog.text and "ocket" not in caplog.text


class TestEnd:
    def test_lets_answers_end_and_says_that_it_goes_away(self):
        config, app = ServerConfig(), Scripted()
        around = Sockets(Guarded(app, config), config)
        own: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "log_config": None, "lifespan": "off"}
        server = uvicorn.Server(uvicorn.Config(around, **own, **uvicorn_options(config)))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        until(lambda: server.started)
        service = Service(app, around.app, server.servers[0].sockets[0].getsockname())  # type: ignore[arg-type]
        with service.connect() as idle, service.connect() as busy:
            busy.send(create("wait"))
            assert get(busy)["type"] == "response.created"
            server.should_exit = True
            assert closing_code(idle) == 1001
            busy.send(create())
            refused = get(busy)
            assert (refused["status"], refused["error"]["headers"]) == (503, {"retry-after": "1"})
            app.gate.set()
            assert answer(busy)[-1]["type"] == "response.incomplete"
            assert closing_code(busy) == 1001
        thread.join(WAIT_S)
        assert not thread.is_alive()

    def test_comes_with_age_and_the_official_client_connects_again(self, service, monkeypatch):
        monkeypatch.setattr(sockets, "MOST_S", 0.2)
        codes: list[int] = []

        def note(attempt: Any) -> None:
            monkeypatch.setattr(sockets, "MOST_S", 3600.0)
            codes.append(attempt.close_code)
            connection.response.create(input="Hi")  # which waits for the new connection

        with openai.OpenAI(base_url=f"{service.base}/v1", api_key="none") as client:
            with client.responses.connect(on_reconnecting=note, initial_delay=0.01) as connection:
                found = [get_kind(next(iter(connection))) for _ in range(4)]
        assert codes == [1001] and found == ["websocket_connection_limit_reached", *KINDS]

    async def test_comes_with_age_and_the_official_async_client_connects_again(self, service, monkeypatch):
        monkeypatch.setattr(sockets, "MOST_S", 0.2)
        sending: list[Any] = []

        def note(attempt: Any) -> None:
            monkeypatch.setattr(sockets, "MOST_S", 3600.0)
            sending.append(asyncio.ensure_future(connection.response.create(input="Hi")))

        async with openai.AsyncOpenAI(base_url=f"{service.base}/v1", api_key="none") as client:
            async with client.responses.connect(on_reconnecting=note, initial_delay=0.01) as connection:
                found = [get_kind(await anext(aiter(connection))) for _ in range(4)]
        assert len(sending) == 1 and found == ["websocket_connection_limit_reached", *KINDS]


KINDS = ["response.created", "response.output_text.delta", "response.incomplete"]


def get_kind(found: Any) -> str:
    return str(found.error.code if found.type == "error" else found.type)


class Transport:
    """A connection whose client reads nothing. Attributes: written: what it was to be sent."""

    written = b""

    def write(self, data: bytes) -> None:
        self.written += data


@pytest.mark.threat("websocket")
def test_pings_are_answered_while_the_client_reads():
    with closing(asyncio.new_event_loop()) as loop:
        config = uvicorn.Config(Scripted(), log_config=None)
        protocol: Any = SocketProtocol(config, ServerState(), {}, loop)
        protocol.transport, protocol.conn.state = Transport(), State.OPEN
        protocol.conn.parser = protocol.conn.parse()
        next(protocol.conn.parser)
        protocol.data_received(b"\x89\x80\0\0\0\0")
        assert protocol.transport.written == b"\x8a\0"
        protocol.pause_writing()
        protocol.data_received(b"\x89\x80\0\0\0\0" * 100)
        assert protocol.transport.written == b"\x8a\0" and not protocol.conn.writes
