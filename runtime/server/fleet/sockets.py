"""A WebSocket at the front: each message of its client becomes a streaming request to a replica."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

from starlette.types import Message, Scope
from starlette.websockets import WebSocket

from llmc.runtime.server.aside import aside, mark
from llmc.runtime.server.errors import ANTHROPIC_TYPES, ApiError
from llmc.runtime.server.fleet.answers import Answer
from llmc.runtime.server.fleet.calls import Call, called
from llmc.runtime.server.messages import VERSIONS
from llmc.runtime.server.sockets import converse, manner_of

Relay = Callable[[Call, Answer], Coroutine[Any, Any, None]]


async def converse_with(relay: Relay, socket: WebSocket) -> None:
    """Answer requests on a WebSocket as a single server does, see :func:`llmc.runtime.server.sockets.converse`.

    Args:
        relay: has a call answered.
    """
    manner = manner_of(socket.scope["path"])

    async def opened(body: dict[str, Any], held: AsyncExitStack) -> AsyncIterator[dict[str, Any]]:
        # The headers of the handshake speak of a WebSocket, but for who sends them.
        version = socket.headers.get("anthropic-version", VERSIONS[-1]).encode()
        headers = [(b"content-type", b"application/json"), (b"anthropic-version", version)]
        content = await aside(lambda: json.dumps({**body, "stream": True}).encode())
        call = called({**socket.scope, "headers": headers}, content)
        return await held.enter_async_context(aclosing(_events(partial(relay, call), call.scope)))

    async def read(message: str) -> dict[str, Any]:
        mark(len(message))
        return await aside(partial(_read, manner.kind, message))

    await converse(socket, manner, read, opened)


def _read(kind: str | None, message: str) -> dict[str, Any]:
    try:
        body = json.loads(message)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the message is no JSON object, expected the body of a request")
    if kind is not None and body.pop("type", None) != kind:
        raise ApiError(400, f"type does not fit: input should be '{kind}'", param="type")
    return body


async def _events(
    relay: Callable[[Answer], Coroutine[Any, Any, None]], scope: Scope
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream; an error raises."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def relayed() -> None:
        try:
            await relay(Answer(scope, sent.put))
        finally:
            sent.put_nowait(None)

    relaying = asyncio.ensure_future(relayed())
    try:
        refused = None  # the status of an answer that is none, or that ends with an error
        while (message := await sent.get()) is not None:
            if message.get("status", 200) >= 400:
                refused = message["status"]
            for event in _decoded(message.get("body", b"")):
                if event.get("type", "error") == "error" and (event.keys() & {"error", "message"}):
                    raise _error(event.get("error", event), refused)
                yield event
        await relaying
    finally:
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)


def _decoded(body: bytes) -> list[dict[str, Any]]:
    """Events, without those that only say that the stream lives; a refusal comes whole, and is one."""
    if body.startswith(b"{"):
        return [json.loads(body)]
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    return [event for event in events if event.get("type") != "ping"]


def _error(error: dict[str, Any], status: int | None) -> ApiError:
    """The error that a replica told of, in whichever dialect; amid an answer without a status, but for its type."""
    status = status or next((status for status, kind in ANTHROPIC_TYPES.items() if kind == error["type"]), 500)
    return ApiError(status, error["message"], param=error.get("param"), code=error.get("code"))
