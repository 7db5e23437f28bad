"""ASGI applications asked without a server: a request in, the whole answer out."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    messages: Sequence[Mapping[str, Any]]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Echo:
    """An application that remembers the scope of the last request, and answers with its body."""

    def __init__(self) -> None:
        self.scope: Mapping[str, Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        if scope["type"] == "websocket":
            assert (await receive())["type"] == "websocket.connect"
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": message["text"]})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def ask(
    app: Any,
    path: str = "/v1/models",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: Sequence[bytes] = (),
    stalls: bool = False,
) -> Answer:
    """A request of one client; ``stalls``: after these pieces of its body nothing comes any more."""
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body]
    if not stalls:
        pieces.append({"type": "http.request", "body": b"", "more_body": False})
    scope = _scope("http", path, headers) | {"method": method}
    return asyncio.run(_talk(app, scope, pieces))


def converse(
    app: Any, texts: Sequence[str], *, headers: Mapping[str, str] | None = None, protocols: Sequence[str] = ()
) -> Answer:
    """Messages of a WebSocket's client, and then its end."""
    said = [{"type": "websocket.receive", "text": text} for text in texts]
    given = [{"type": "websocket.connect"}, *said, {"type": "websocket.disconnect", "code": 1000}]
    scope = _scope("websocket", "/v1/chat/completions", headers) | {
        "subprotocols": list(protocols),
        "extensions": {"websocket.http.response": {}},
    }
    return asyncio.run(_talk(app, scope, given))


def _scope(kind: str, path: str, headers: Mapping[str, str] | None) -> dict[str, Any]:
    given = {"host": "localhost:8000", **(headers or {})}
    return {
        "type": kind,
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "state": {},
    }


async def _talk(app: Any, scope: Any, given: list[dict[str, Any]]) -> Answer:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not given:
            await asyncio.Event().wait()
        return given.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    first = next((message for message in sent if message["type"].endswith(".start")), {})
    headers = {name.decode(): value.decode() for name, value in first.get("headers", [])}
    body = b"".join(message.get("body", b"") for message in sent)
    return Answer(first.get("status", 0), headers, body, sent)
