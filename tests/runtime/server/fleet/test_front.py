"""The front before replicas that answer, and are lost, as a script says."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from llmc.runtime.server.fleet.answers import LOST
from llmc.runtime.server.fleet.calls import Forwarded, ReplicaLostError, session_of
from llmc.runtime.server.fleet.front import ATTEMPTS, make_front
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import event

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


class Lost:
    """In a script: the replica is lost here."""


class Scripted:
    """Replicas, of which each gives the next answer of a script.

    Attributes:
        calls: what they were asked.
    """

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.calls: list[Forwarded] = []

    async def answer(self, call: Forwarded) -> AsyncGenerator[list[Message], None]:
        self.calls.append(call)
        script = self._scripts.pop(0)
        for one in script:
            if one is Lost:
                raise ReplicaLostError("it is gone")
            if isinstance(one, Exception):
                raise one
            if one is asyncio.sleep:
                await asyncio.sleep(3600)
            yield one if isinstance(one, list) else [one]


def start(status: int = 200, kind: str = "text/event-stream") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def body(piece: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}


ROLE = body(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
HELLO = body(event({"choices": [{"index": 0, "delta": {"content": "Hello"}}]}))
END = [body(DONE), body(b"", more=False)]
JSON = [[start(kind="application/json"), body(b'{"whole": 1}', more=False)]]


def ask(replicas: Scripted, path: str = CHAT, **given: Any) -> Any:
    with TestClient(make_front(replicas)) as client:
        return client.post(path, json={"messages": [], **given})


class TestLosing:
    def test_a_replica_before_its_answer_goes_unnoticed(self):
        replicas = Scripted([Lost], JSON)
        answer = ask(replicas)
        assert (answer.status_code, answer.json()) == (200, {"whole": 1})
        assert replicas.calls[0] == replicas.calls[1]

    def test_one_that_had_sent_its_headers_alone_goes_unnoticed(self):
        answer = ask(Scripted([start(), Lost], [start(), ROLE, HELLO, *END]), stream=True)
        assert answer.content == ROLE["body"] + HELLO["body"] + DONE

    def test_one_whose_stream_had_begun_ends_the_stream_with_an_error(self):
        answer = ask(Scripted([start(), ROLE, Lost]), stream=True)
        assert answer.content.startswith(ROLE["body"])
        (last,) = [json.loads(line[6:]) for line in answer.text.splitlines()[-2:] if line]
        assert last["error"]["message"] == LOST and last["error"]["code"] == "replica_lost"
        assert b"[DONE]" not in answer.content

    def test_one_amid_a_whole_answer_breaks_the_connection(self):
        with pytest.raises(ConnectionError, match="lost"):
            ask(Scripted([start(kind="application/json"), body(b'{"half":'), Lost]))

    @pytest.mark.threat("replica-crash")
    def test_all_that_were_tried_is_503(self):
        replicas = Scripted(*[[Lost]] * ATTEMPTS)
        answer = ask(replicas)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert len(replicas.calls) == ATTEMPTS

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("/v1/messages", {"type": "error"}),
            ("/v1/responses", {"type": "error", "code": "replica_lost", "sequence_number": 2}),
        ],
    )
    def test_is_told_in_the_dialect_of_the_route(self, path, error):
        said = body(event({"type": "delta"}, "delta"))
        answer = ask(Scripted([start(), said, said, Lost]), path)
        kinds = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        assert kinds == ["delta", "delta", "error"]
        assert error.items() <= json.loads(answer.text.splitlines()[-2][6:]).items()


class TestAnswers:
    def test_a_refusal_of_the_router_is_the_answer(self):
        answer = ask(Scripted([ApiError(429, "many wait", code="queue_full", retry_after_s=1)]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")

    def test_a_request_brings_its_session_and_what_the_guards_found(self):
        replicas = Scripted(JSON)
        ask(replicas, messages=[{"role": "user", "content": "x"}])
        call = replicas.calls[0]
        assert call.session and json.loads(call.body)["messages"]
        assert (call.scope["method"], call.scope["path"], call.scope["root_path"]) == ("POST", CHAT, "")

    def test_live_is_the_front_itself(self):
        with TestClient(make_front(Scripted())) as client:
            assert client.get("/health").json() == {"status": "ok"}

    def test_ready_does_not_wait_for_a_replica(self, monkeypatch):
        monkeypatch.setattr("llmc.runtime.server.fleet.front.ASKED_S", 0.01)
        with TestClient(make_front(Scripted([asyncio.sleep]))) as client:
            assert client.get("/ready").status_code == 503

    def test_metrics_are_left_to_ray(self):
        replicas = Scripted()
        with TestClient(make_front(replicas)) as client:
            assert client.get("/metrics").status_code == 404 and replicas.calls == []


def session(**asked: Any) -> str:
    return session_of(json.dumps({"model": "m", **asked}).encode())


USER, REPLY = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
MARKED = {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}


def test_the_turns_of_a_conversation_have_one_session():
    first = session(messages=[USER])
    assert first == session(messages=[USER, REPLY, {"role": "user", "content": "More"}], temperature=1)
    assert first == session(messages=[MARKED]) == session(input="Hello")
    others = [{"model": "n"}, {"system": "Be kind."}, {"messages": [REPLY]}]
    assert len({first, *(session(**{"messages": [USER], **other}) for other in others)}) == len(others) + 1


def test_a_clients_key_names_the_session():
    one = session(prompt_cache_key="a", messages=[USER])
    assert one == session(prompt_cache_key="a", messages=[REPLY]) != session(prompt_cache_key="b", messages=[USER])


@pytest.mark.parametrize("asked", [b"", b"[]", b"{", b"[" * 10_000, b'{"prompt": [1, 2]}'])
def test_a_request_without_texts_has_no_session(asked):
    assert session_of(asked) == ""


def run(app: Any, receive: Callable[[], Coroutine[Any, Any, Message]]) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return sent


def test_a_client_that_is_gone_cancels_its_request():
    replicas = Scripted([start(), HELLO, asyncio.sleep])
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return next(messages)

    sent = run(make_front(replicas), receive)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
