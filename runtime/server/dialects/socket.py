"""OpenAI's WebSocket mode of responses: a frame is a request, and the events of its stream are the answer's frames.

The handshake and every frame go through the whole application as requests of HTTP do. So keys, rates, limits, the log,
metrics, an upstream and a fleet hold for them as for any other request.
"""

import asyncio
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import format_value
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.arrival import check_json
from llmc.runtime.server.http.call import LARGE, apart
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.guarded import ANSWERED_BY, GOING_DOWN, OFFER, SOCKET
from llmc.runtime.server.http.streams import encode_json, in_pieces
from llmc.runtime.server.models.response_store import Item, ResponseStore, Stored, read

T = TypeVar("T")
# OpenAI's bounds of a connection: answers at once, names of streams, and seconds.
MOST_AT_ONCE, MOST_STREAMS, MOST_S = 16, 32, 3600.0
MOST_UNANSWERED = 64  # frames; together they may have as many bytes as one body
MEMORY_BYTES = 64 << 20  # of the conversations that all connections together remember
GOING_AWAY, POLICY = 1001, 1008  # codes with which a connection is closed
ENDS = ("response.completed", "response.incomplete", "response.failed")
TOLD = ("retry-after", "x-llmc-", "x-ratelimit-", "x-request-id")  # headers of answers that frames have, too
_ITEM = re.compile(r"^input\[(\d+)\]")
_STREAM = re.compile(r"[\w.-]{1,256}", re.ASCII)
_DROPPED = re.compile(rb"connection|content-.+|expect|sec-websocket-.+|transfer-encoding|upgrade")  # of the handshake's


class Sockets:
    """An application that takes WebSockets beside requests of HTTP; it stands around all others."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self.most_bytes = config.max_body_bytes
        self.memory = ResponseStore(MEMORY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        connection = _Connection(self, scope, receive, send)
        with suppress(OSError):  # the client is gone
            if await connection.open():
                await connection.run()


class _Connection:
    """The WebSocket of one client, which remembers its responses. Frames of one stream are answered in their order,
    streams beside each other."""

    def __init__(self, sockets: Sockets, scope: Scope, receive: Receive, send: Send) -> None:
        self._sockets, self._scope, self._receive, self._send = sockets, scope, receive, send
        self._owner, self._names = secrets.token_hex(8), set[str]()  # of what it remembers
        self._streams: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._turns: dict[asyncio.Task[None], int] = {}  # with the bytes of their frames
        self._gone = asyncio.Event()
        self._ends = asyncio.Event()  # it takes no more frames
        self._code = GOING_AWAY

    async def open(self) -> bool:
        """True if the guards accept the handshake; else it is answered as a request that they refuse."""
        sent: list[Message] = []

        async def take(message: Message) -> None:
            sent.append(message)

        await self._sockets.app({**self._request("GET"), OFFER: True}, self._receive, take)
        if sent[0]["status"] == 101:
            await self._send({"type": "websocket.accept", "headers": _pick_told(sent[0])})
            return True
        for message in sent:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        return False

    def _request(self, method: str, body: bytes = b"") -> Scope:
        """The scope of a request with the headers of the handshake; each one with a body gets an id of its own."""
        headers = [(name, value) for name, value in self._scope["headers"] if not _DROPPED.fullmatch(name)]
        if body:
            headers = [pair for pair in headers if pair[0] != b"x-request-id"]
            headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scheme = "https" if self._scope.get("scheme") == "wss" else "http"
        own = {"type": "http", "method": method, "scheme": scheme, "headers": headers, "state": {}, "extensions": {}}
        return {**self._scope, **own, "path": SOCKET, "raw_path": SOCKET.encode(), "query_string": b""}

    async def run(self) -> None:
        """Answer frames until the client leaves or the connection ends, and then those that came before."""
        reading, ending = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._ends.wait())
        try:
            await asyncio.wait((reading, ending), timeout=MOST_S, return_when=asyncio.FIRST_COMPLETED)
            is_old = not reading.done() and not ending.done()
            self._ends.set()
            while self._turns and not reading.done():
                await asyncio.wait((reading, *self._turns), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if is_old:
                said = f"the connection is {MOST_S / 60:g} minutes old, as old as it may be; open another one"
                await self.refuse(ApiError(400, said, code="websocket_connection_limit_reached"))
            return await self._send({"type": "websocket.close", "code": self._code})
        finally:
            self._gone.set()
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, *self._turns, return_exceptions=True)
            for name in self._names:
                with suppress(ApiError):  # it had to make room
                    self._sockets.memory.delete(self._owner, name)

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                text = message.get("text")
                await self._take(bytes(message["bytes"]) if text is None else text.encode())
            elif message["type"] == GOING_DOWN:
                self._ends.set()
            await asyncio.sleep(0)  # one read may bring thousands of frames, between which others have their turn
        self._gone.set()

    async def _take(self, frame: bytes) -> None:
        """Begin to answer a frame, once those of its stream that came before are."""
        stream = None
        try:
            event = await _aside(len(frame) > LARGE, partial(check_json, frame))
            if not isinstance(event, dict):
                raise ApiError(400, "the message is no JSON object, expected one of the type response.create")
            stream = _name_stream(event.get("stream_id"))
            if event.get("type") == "response.steer":
                return await self.tell(_refuse_steering(event))
            if event.get("type") != "response.create":
                found = format_value(event["type"]) if "type" in event else "missing"
                raise ApiError(400, f"type is {found}, expected response.create", param="type")
            if not isinstance(event.get("generate"), bool | None):
                said = f"generate is {format_value(event['generate'])}, expected true or false"
                raise ApiError(400, said, param="generate")
            self._check_room(stream, len(frame))
        except ApiError as error:
            return await self.refuse(error, stream)
        turn = asyncio.ensure_future(self._answer(_Turn(self, event, stream), len(frame) > LARGE))
        self._turns[turn] = len(frame)
        turn.add_done_callback(self._turns.pop)
        return None

    def _check_room(self, stream: str | None, size: int) -> None:
        if self._ends.is_set():
            raise ApiError(503, "this connection takes no more requests; open another one", retry_after_s=1)
        if stream is not None and stream not in self._streams and len(self._streams.keys() - {None}) >= MOST_STREAMS:
            said = f"stream_id is another one than the {MOST_STREAMS} of this connection; use one of them"
            raise ApiError(400, said, param="stream_id", code="websocket_stream_limit_reached")
        waiting = sum(self._turns.values())
        if len(self._turns) >= MOST_UNANSWERED or (waiting and waiting + size > self._sockets.most_bytes):
            said = f"{len(self._turns)} messages of {waiting} bytes are not answered yet; wait for an answer"
            raise ApiError(429, said, code="queue_full", retry_after_s=1)

    async def _answer(self, turn: "_Turn", is_large: bool) -> None:
        async with self._streams[turn.stream], self._slots:
            if self._gone.is_set():
                return
            body = await _aside(is_large or turn.previous is not None, turn.make_body)
            bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive() -> Message:
                if (first := next(bodies, None)) is not None:
                    return first
                await self._gone.wait()
                return {"type": "http.disconnect"}

            await self._sockets.app(self._request("POST", body), receive, turn.take)
            if not turn.ended:
                said = "something went wrong inside; the log of the server has more"
                await self.refuse(ApiError(500, said), turn.stream)
            if turn.status == 401:  # the key was withdrawn
                self._code = POLICY
                self._ends.set()

    async def tell(self, event: Mapping[str, Any] | str) -> None:
        """Send an event, unless the client is gone."""
        with suppress(OSError):
            text = event if isinstance(event, str) else encode_json(event)
            await self._send({"type": "websocket.send", "text": text})

    async def refuse(self, error: ApiError, stream: str | None = None) -> None:
        await self.tell(_make_error(error.status, error.body["error"], error.headers, stream))

    def remember(self, name: str, stored: Stored) -> None:
        """Remember a response for its conversation, unless an upstream uses its name again: it would have no end."""
        if name not in self._names and name != stored.previous:
            self._names.add(name)
            self._sockets.memory.put(self._owner, name, stored)

    def recall(self, name: str | None) -> tuple[list[Item], str | None]:
        """The items of a conversation that this connection alone knows, and the response that they go on from."""
        turns = []
        with suppress(ApiError):  # one that is not remembered here
            while name is not None:
                stored = self._sockets.memory.get(self._owner, name)
                turns.append([*read(stored.items), *read(stored.response)])
                name = stored.previous
        return [item for turn in reversed(turns) for item in turn], name


class _Turn:
    """A client's event as a request, and the answer as events.

    Attributes:
        status: of the answer.
        ended: its last event was sent.
    """

    def __init__(self, connection: _Connection, event: dict[str, Any], stream: str | None) -> None:
        self._connection, self._event, self.stream = connection, event, stream
        self.previous = event.get("previous_response_id")
        options = event.get("prompt_cache_options")
        # The prompt is computed, and kept for the next turn, and nothing is said.
        self._warms = event.get("generate") is False or (isinstance(options, dict) and options.get("prewarm") is True)
        self.status, self.ended = 0, False
        self._before = 0  # items of the conversation before those of the event
        self._headers = Headers()
        self._items = self._body = b""
        self._told: dict[str, str] = {}

    def make_body(self) -> bytes:
        body = {k: v for k, v in self._event.items() if k not in ("type", "stream_id", "generate")} | {"stream": True}
        if self._warms:
            body |= {"store": False, "max_output_tokens": 1}  # an engine cannot do without
        new = body.get("input") or ([] if self.previous else None)
        new = [{"role": "user", "content": new}] if isinstance(new, str) else new
        self._items = in_pieces(new).encode()
        if isinstance(self.previous, str) and isinstance(new, list):
            before, root = self._connection.recall(self.previous)
            self._before = len(before)
            body |= {"input": [*before, *new], "previous_response_id": root}
        return in_pieces(body).encode()

    async def take(self, message: Message) -> None:
        """The ``send`` of the request."""
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], Headers(raw=message["headers"])
            self._told = {name.decode("latin-1"): value.decode("latin-1") for name, value in _pick_told(message)}
            return
        self._body += message.get("body", b"")
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            *events, self._body = re.split(rb"\r?\n\r?\n", self._body)
            for data in filter(lambda data: data.startswith(b"{"), map(_data_of, events)):
                if told := await _aside(len(data) > LARGE, partial(self._rewrite, data)):
                    await self._connection.tell(told)
        elif not message.get("more_body", False):
            await self._refuse(json.loads(self._body)["error"])

    async def _refuse(self, error: dict[str, Any]) -> None:
        """Send what the answer is in place of a stream; what a conversation goes on from is OpenAI's own word."""
        status, self.ended = self.status, True
        if error.get("code") == "response_not_found":
            own = {"code": "previous_response_not_found", "param": "previous_response_id"}
            status, error = 400, {**error, **own, "type": "invalid_request_error"}
        error |= {name: self._name_own(error[name]) for name in ("message", "param") if error.get(name)}
        await self._connection.tell(_make_error(status, error, self._told, self.stream))

    def _name_own(self, text: str) -> str:
        """A text that begins with the place of an item, counted among those of the event."""
        return _ITEM.sub(lambda found: f"input[{int(found[1]) - self._before}]", text)

    def _rewrite(self, data: bytes) -> str | None:
        """The frame of an event of the answer; None: it is left out."""
        event = json.loads(data)
        response, kind = event.get("response"), event["type"]
        if kind == "error":
            event = _make_error(500, event.get("error") or event, self._told, self.stream)
        elif isinstance(response, dict):
            response["previous_response_id"] = self.previous
            if self._warms:
                self._empty(event, response)
            if kind in ENDS[:2]:
                self._remember(response)
            if kind == "response.created":
                event["headers"] = self._told
        elif self._warms:
            return None
        self.ended |= kind in (*ENDS, "error")
        return encode_json(event if self.stream is None else {**event, "stream_id": self.stream})

    def _empty(self, event: dict[str, Any], response: dict[str, Any]) -> None:
        """Take the token that nobody wants out of a response."""
        response["max_output_tokens"] = self._event.get("max_output_tokens")
        if event["type"] in ENDS[:2]:
            event |= {"type": "response.completed", "sequence_number": 2}
            response |= {"status": "completed", "completed_at": int(time.time()), "incomplete_details": None}
            response |= {"output": [], "usage": {**response["usage"], "output_tokens": 0}}
            response["usage"]["total_tokens"] = response["usage"]["input_tokens"]

    def _remember(self, response: dict[str, Any]) -> None:
        """Remember a response, unless this service has stored it."""
        if not response.get("store") or self._headers.get(ANSWERED_BY, "box") != "box":
            output = in_pieces(response["output"]).encode()
            self._connection.remember(response["id"], Stored(self.previous, self._items, output))


async def _aside(is_large: bool, work: Callable[[], T]) -> T:
    return await apart(work) if is_large else work()


def _name_stream(name: Any) -> str | None:
    if name is not None and not (isinstance(name, str) and _STREAM.fullmatch(name)):
        said = f"stream_id is {format_value(name)}, expected 1 to 256 letters, digits and . _ -"
        raise ApiError(400, said, param="stream_id", code="invalid_stream_id")
    return name


def _data_of(event: bytes) -> bytes:
    """The data of a server-sent event; none of a comment."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def _pick_told(start: Message) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in start["headers"] if name.decode("latin-1").startswith(TOLD)]


def _make_error(
    status: int, error: Mapping[str, Any], headers: Mapping[str, str], stream: str | None
) -> dict[str, Any]:
    kind = "server_error" if error.get("type") in (None, "error") else error["type"]  # an event is one, too
    told = {"type": kind, **{name: error.get(name) for name in ("code", "message", "param")}, "headers": headers}
    named = {} if stream is None else {"stream_id": stream}
    return {"type": "error", "status": status, "error": told, **named}


def _refuse_steering(event: Mapping[str, Any]) -> dict[str, Any]:
    said = "responses are not steered here; send response.create with this input once the answer has ended"
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": said}
    steer = {name: event.get(name) for name in ("input", "previous_response_id")}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}
