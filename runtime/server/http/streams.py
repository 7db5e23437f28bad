"""Answers that come in pieces: server-sent events with heartbeats, until the client is gone."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.errors import LlmcError
from llmc.runtime.server.http.call import SHORT, apart, room_beside
from llmc.runtime.server.http.errors import ApiError, from_llmc
from llmc.strict import escape_line_ends

T = TypeVar("T")
PIECE = 256  # items of a list that are encoded in one call
HEARTBEAT = b": heartbeat\n\n"  # a comment, which clients skip
# Proxies must neither keep nor collect the events (X-Accel-Buffering is nginx's).
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


# No check for circles: answers have none, and the check takes longer than the encoding.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)


def encode_json(value: Any) -> str:
    """JSON in one line, for events and answers."""
    return escape_line_ends(_JSON.encode(value))


def in_pieces(value: Any) -> str:
    """:func:`encode_json` of a value of any size, which lets other threads have their turn meanwhile."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_json(str(name))}:{in_pieces(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple) and len(value) > PIECE:
        return "[" + ",".join(in_pieces(value[at : at + PIECE])[1:-1] for at in range(0, len(value), PIECE)) + "]"
    if isinstance(value, list | tuple) and room_beside(value, SHORT) < 0:
        return "[" + ",".join(map(in_pieces, value)) + "]"
    return encode_json(value)


async def unless_long(value: Any, encode: Callable[[], T]) -> T:
    """The encoded ``value``: at once, or from another thread where it is long."""
    return await apart(encode) if room_beside(value, SHORT) < 0 else encode()


async def make_answer(make: Callable[[], Any], *, large: bool) -> Response:
    """The answer that ``make`` makes, as JSON; made and encoded off the event loop where it may be ``large``."""
    if large:
        return Response(await apart(lambda: in_pieces(make())), media_type="application/json")
    return Response(encode_json(make()), media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encode_json(value)}\n\n".encode()


class EventStream(Response):
    """Server-sent events, and a comment whenever ``heartbeat_s`` seconds pass without one.

    The client's disconnection is noticed at once, also while the request waits in a queue: the events are closed then,
    which cancels the request.

    Args:
        events: encoded events; closed at the end, in whichever way it comes.
        held: what the events need, such as the model; closed after them.
        heartbeat_s: seconds; 0 sends no heartbeats.
        heartbeat: what is sent then.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], held: AsyncExitStack, heartbeat_s: float, *, heartbeat: bytes = HEARTBEAT
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # of an empty body
        self._events = events
        self._held = held
        self._heartbeat_s = heartbeat_s
        self._heartbeat = heartbeat
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, unless the client leaves before."""
        heart = asyncio.ensure_future(self._beat(send))
        async with self._held:
            try:
                await unless_gone(receive, self._send(send))
            except ApiError:  # the client is gone; a request's own error is one of its events
                pass
            finally:
                heart.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for piece in events:
                self._sent += 1
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while self._heartbeat_s:
            before = self._sent
            await asyncio.sleep(self._heartbeat_s)
            if self._sent == before:
                with suppress(Exception):  # whatever hinders a beat hinders what is sent too, where it is told
                    await send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, answer: Awaitable[T]) -> T:
    """Wait for the answer to a request, and stop waiting when its client is gone.
    Raises ApiError: the client is gone, and nobody reads the answer."""
    waiting = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ApiError(499, "the client closed the connection before the answer was there")
    finally:
        for task in (waiting, gone):
            task.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def guard_pieces(
    pieces: AsyncIterator[T], encode: Callable[[T], bytes], refuse: Callable[[ApiError], bytes], end: bytes = b""
) -> AsyncIterator[bytes]:
    """Pieces of an answer, encoded, and an error as the last one of them, or ``end``."""
    async with aclosing(pieces) as guarded:  # type: ignore[type-var]
        try:
            async for piece in guarded:
                yield encode(piece)
        except (ApiError, LlmcError) as error:
            yield refuse(from_llmc(error))
        else:
            if end:
                yield end
