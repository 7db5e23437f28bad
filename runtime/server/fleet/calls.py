"""A request on its way from the front to a replica."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from llmc.runtime.server.http.call import call_of

# The members of ASGI's scope that a route may look at, and that can be sent elsewhere.
SENT = ("http_version", "scheme", "query_string", "headers", "client")
BILL = "llmc.bill"  # type of the message, among those of ASGI, with which a replica tells what the client took


class ReplicaLostError(Exception):
    """The replica is gone, and what it was asked with it."""


@dataclass(frozen=True)
class Forwarded:
    """A request as a replica gets it. ``session``: see :func:`session_of`."""

    scope: dict[str, Any]
    body: bytes
    session: str


def make_call(scope: Scope, body: bytes) -> Forwarded:
    """A request as it is sent to a replica, for which the application stands at the top of its host."""
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    kept = {name: scope[name] for name in SENT if name in scope}
    own = {"type": "http", "asgi": {"version": "3.0"}, "method": scope.get("method", "POST"), "root_path": ""}
    key = call_of(scope).client.key
    state: dict[str, Any] = {name: value for name, value in scope["state"].items() if isinstance(value, str | None)}
    if key is not None:
        state["key"] = replace(key, digest=b"")  # what it is for, and nothing to recognise it by
    return Forwarded({**kept, **own, "path": path, "raw_path": path.encode(), "state": state}, body, session_of(body))


def session_of(body: bytes) -> str:
    """Name that all turns of a conversation have, by which Ray's router sends them to one replica: made of the client's
    ``prompt_cache_key``, else of model, system prompt and first message of the user. Empty for other requests."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    texts = list(_texts(request.get("prompt_cache_key"))) or list(_beginning(request))
    named = json.dumps([request.get("model"), *texts]).encode()
    return blake2b(named, digest_size=16).hexdigest() if texts else ""


def _beginning(request: dict[str, Any]) -> Iterator[str]:
    for member in ("system", "instructions", "prompt", "messages", "input"):
        value = request.get(member)
        for item in value if isinstance(value, list) else [value]:
            yield from _texts(item)
            if isinstance(item, dict) and item.get("role") == "user":
                return


def _texts(value: Any) -> Iterator[str]:
    """Texts of a message, or of a part of one, in any dialect."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from _texts(value.get("content") or value.get("text"))
