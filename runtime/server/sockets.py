"""Requests over a WebSocket, one after another: a body as text in, the events of its answer as texts out."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from llmc.errors import LlmcError
from llmc.runtime.server.errors import ApiError, as_message, from_llmc
from llmc.runtime.server.streams import encoded, unless_long

Events = AsyncIterator[dict[str, Any]] | AsyncIterator[str]
Opened = Callable[[Any, AsyncExitStack], Awaitable[Events]]


@dataclass(frozen=True)
class Manner:
    """The manner in which a dialect speaks over a WebSocket.

    Attributes:
        end: the message after the last event; None where the events themselves say which is the last.
        kind: the ``type`` that a client's messages have beside the members of a body; None: they are bodies alone.
        waiting: messages that wait for their turn while a request is answered; 0: any message cancels the request.
    """

    end: str | None = None
    kind: str | None = None
    waiting: int = 0


CHUNKS = Manner(end="[DONE]")
# Of OpenAI's socket: https://developers.openai.com/api/docs/guides/websocket-mode
MANNERS = {"/v1/responses": Manner(kind="response.create", waiting=8), "/v1/messages": Manner()}


def manner_of(path: str) -> Manner:
    """The manner of a route."""
    return MANNERS.get(path, CHUNKS)


async def converse(socket: WebSocket, manner: Manner, read: Callable[[str], Awaitable[Any]], opened: Opened) -> None:
    """Answer requests on a WebSocket until it is closed.

    A text message is a request. Its events come back as text messages; an error ends them, too, and after either the
    next request may come.

    Args:
        manner: how the route's dialect does so.
        read: makes a request of a message.
        opened: submits it, and gives its events, as JSON or before.
    """
    await socket.accept()
    waiting: deque[str] = deque()
    with suppress(WebSocketDisconnect):
        while True:
            message = waiting.popleft() if waiting else _text(await socket.receive())
            try:
                async with AsyncExitStack() as held:
                    await _answer(socket, manner, await opened(await read(message), held), waiting)
            except (ApiError, LlmcError) as error:
                await _tell(socket, error if isinstance(error, ApiError) else from_llmc(error))


async def _answer(socket: WebSocket, manner: Manner, events: Events, waiting: deque[str]) -> None:
    """Send the events, and hear the client meanwhile."""
    sending = asyncio.ensure_future(_send_all(socket, manner, events))
    tasks: list[asyncio.Future[Any]] = [sending]
    try:
        while not sending.done():
            heard = asyncio.ensure_future(socket.receive())
            tasks = [sending, heard]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if heard.done():
                await _hear(socket, manner, _text(heard.result()), waiting, sending.done())
        sending.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hear(socket: WebSocket, manner: Manner, message: str, waiting: deque[str], is_next: bool) -> None:
    """A message amid an answer; ``is_next`` where the answer has just ended.

    Raises:
        ApiError: the dialect takes it for the end of the request.
    """
    if is_next or len(waiting) < manner.waiting:
        waiting.append(message)
    elif manner.waiting:
        said = f"{len(waiting)} messages wait for the answer to an earlier one, as many as may; send this one later"
        await _tell(socket, ApiError(429, said, code="queue_full"))
    else:
        raise ApiError(499, "the request was cancelled by a message of its client")


def _text(message: Message) -> str:
    """The text of a client's message.

    Raises:
        WebSocketDisconnect: it is the last one.
    """
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    text: str | None = message.get("text")
    return (message.get("bytes") or b"").decode("utf-8", "replace") if text is None else text


async def _tell(socket: WebSocket, error: ApiError) -> None:
    await socket.send_text(encoded(as_message(socket.scope, error)))


async def _send_all(socket: WebSocket, manner: Manner, events: Events) -> None:
    async with aclosing(events) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            text = piece if isinstance(piece, str) else await unless_long(piece, partial(encoded, piece))
            await socket.send_text(text)
    if manner.end is not None:
        await socket.send_text(manner.end)
