"""Parameters that a route accepts though they cannot change its answer; the header ``x-llmc-ignored`` names them."""

from collections.abc import Mapping
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-llmc-ignored"
MOST = 32  # names in the header; a client may send thousands
_NAMES: ContextVar[dict[str, None] | None] = ContextVar("llmc_ignored", default=None)


def ignore(name: str) -> None:
    """Accept a parameter without honouring it, and tell the client so.

    Call it only for what cannot change this answer; everything else is honoured or refused. ``name``: the parameter, as
    ``annotations``; characters that a header cannot hold are left out of it.
    """
    names = _NAMES.get()
    if names is not None and len(names) < MOST and (clean := "".join(filter(_fits, name[:128]))):
        names[clean] = None


def rename_ignored(names: Mapping[str, str]) -> None:
    """Call the parameters ignored so far by the dialect's own ``names``."""
    if ignored := _NAMES.get():
        renamed = {names.get(name, name): None for name in ignored}
        ignored.clear()
        ignored.update(renamed)


def forget_ignored() -> None:
    """Name none of those so far: another service answers, which gets them all."""
    (_NAMES.get() or {}).clear()


def _fits(character: str) -> bool:
    return character.isascii() and character.isprintable() and character != ","


def name_ignored(app: ASGIApp) -> ASGIApp:
    """Name in each answer's header what :func:`ignore` was told of while the answer was made."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        names: dict[str, None] = {}
        _NAMES.set(names)  # of this request's task alone

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message)[HEADER] = ", ".join(names)
            await send(message)

        await app(scope, receive, send_named)

    return call
