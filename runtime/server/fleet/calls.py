"""A request on its way from the front to a replica."""

from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Scope

from llmc.runtime.server.fleet.prefixes import prefix_of

# The members of ASGI's scope that a route may look at, and that can be sent elsewhere.
SENT = ("http_version", "scheme", "query_string", "headers", "client")
BILL = "llmc.bill"  # type of the message, among those of ASGI, with which a replica tells what the client took


class ReplicaLostError(Exception):
    """The replica is gone, and what it was asked with it."""


@dataclass(frozen=True)
class Call:
    """A request. ``prefix``: names of its prompt's blocks."""

    scope: dict[str, Any]
    body: bytes
    prefix: tuple[bytes, ...]


def make_call(scope: Scope, body: bytes) -> Call:
    """A request as it is sent to a replica, for which the application stands at the top of its host."""
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    kept = {name: scope[name] for name in SENT if name in scope}
    own = {"type": "http", "asgi": {"version": "3.0"}, "method": scope.get("method", "POST"), "root_path": ""}
    known = scope.get("state", {})
    state = {name: value for name, value in known.items() if isinstance(value, str | None)}
    if (key := known.get("key")) is not None:
        state["key"] = replace(key, digest=b"")  # what it is for, and nothing to recognise it by
    prefix = prefix_of(path, body, known.get("prefix_scope"))
    return Call({**kept, **own, "path": path, "raw_path": path.encode(), "state": state}, body, prefix)
