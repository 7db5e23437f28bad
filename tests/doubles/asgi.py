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
    given = {"host": "localhost:8000", **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "state": {},
    }
    return asyncio.run(_talk(app, scope, pieces))


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
