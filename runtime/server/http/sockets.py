"""Requests over a WebSocket, one after another: a body as text in, the events of its answer as texts out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from llmc.errors import LlmcError
from llmc.runtime.server.http.bodies import Body
from llmc.runtime.server.http.errors import ApiError, from_llmc
from llmc.runtime.server.http.streams import encode_json
from llmc.runtime.server.http.validation import read_json

Opened = Callable[[Any, AsyncExitStack], Awaitable[AsyncIterator[str]]]
PATHS = ("/v1/chat/completions", "/v1/completions")  # of the routes that have one
END = "[DONE]"


async def converse(socket: WebSocket, kind: type[Body], opened: Opened) -> None:
    """Answer requests on a WebSocket until it is closed.

    A text message is a request. Its events come back as text messages, the last one is ``[DONE]`` or an error, and then
    the next request may come. A message before that cancels the request. ``opened``: submits it, and gives its events,
    as JSON.
    """
    await socket.accept()
    async with aclosing(_Client(socket)) as client:
        with suppress(WebSocketDisconnect):
            while True:
                asked = await client.message()
                try:
                    async with AsyncExitStack() as held:
                        await _answer(socket, client, await opened(await read_json(kind, asked), held))
                except (ApiError, LlmcError) as error:
                    await socket.send_text(encode_json(from_llmc(error).body))


class _Client:
    """A client's messages: one task receives them all, since a receive that is cancelled loses its message."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.waiting = asyncio.ensure_future(socket.receive())

    async def message(self) -> str:
        """The next message. Raises WebSocketDisconnect: there is none."""
        text = _text(await self.waiting)
        self.waiting = asyncio.ensure_future(self._socket.receive())
        return text

    async def aclose(self) -> None:
        self.waiting.cancel()
        await asyncio.gather(self.waiting, return_exceptions=True)


async def _answer(socket: WebSocket, client: _Client, events: AsyncIterator[str]) -> None:
    """Send the events, and hear the client meanwhile. Raises ApiError: a message came before the last event."""
    sending = asyncio.ensure_future(_send_all(socket, events))
    try:
        await asyncio.wait((sending, client.waiting), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            await client.message()
            raise ApiError(499, "the request was cancelled by a message of its client")
        sending.result()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _text(message: Message) -> str:
    """The text of a client's message. Raises WebSocketDisconnect: it is the last one."""
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    text: str | None = message.get("text")
    return (message.get("bytes") or b"").decode("utf-8", "replace") if text is None else text


async def _send_all(socket: WebSocket, events: AsyncIterator[str]) -> None:
    async with aclosing(events) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            await socket.send_text(piece)
    await socket.send_text(END)
