"""Bodies of requests, read whole before the application sees them: within their size, their time and their nesting."""

import json
import re
from collections import Counter
from functools import partial
from typing import Any

from anyio import move_on_after
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import printable
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.call import LARGE, call_of
from llmc.runtime.server.http.errors import ApiError, refuse

# Values take some fifty times the bytes of "[]," once Python holds them; no request of the API has nearly as many, but
# for prompts of token ids. So many are checked in 30 ms, in which nothing else of Python runs.
MOST_VALUES = 300_000
# Texts, names of members among them, and as many objects and arrays. One object of so many members is read in 20 ms, in
# which nothing else of Python runs.
MOST_PARTS = 1 << 16
DEEPEST = 64  # arrays and objects inside one another
PIECE = 1 << 18  # bytes that are looked at in one call
LINGER_S = 2.0  # how long a client that sends too much is listened to, so that it reads why
# The key of the scope under which an application finds the value that the body is.
PARSED = "llmc.parsed"
# Routes whose bodies are forms with files, and no JSON.
FORM_ROUTES = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# The escape of half a character, which JSON allows and UTF-8 does not.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{},"))


class Bodies:
    """Read the body, refuse what is beyond a limit, and hand the whole on in one message, and the value that it is."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._most = config.max_body_bytes
        self._time = config.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _has_body(scope):
            return await self.app(scope, receive, send)
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            return await _refuse_and_linger(scope, receive, send, error)
        if body is None:  # the client is gone
            return None
        call = call_of(scope)
        call.size = len(body)
        if scope["path"] in FORM_ROUTES:
            return await self.app(scope, _replay(body, receive), send)
        try:
            scope[PARSED] = await call.aside(partial(check_json, body))
        except ApiError as error:
            return await refuse(scope, receive, send, error)
        return await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "0")
        self._check_size(int(declared) if declared.isdecimal() and len(declared) < 20 else self._most + 1)
        pieces, size = [], 0
        with move_on_after(self._time):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                self._check_size(size)
                if not message.get("more_body", False):
                    return b"".join(pieces)
        raise ApiError(408, f"the body was not there after {self._time:g} s; send it faster, or less", code="timeout")

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise ApiError(
                413, f"the body has more than {self._most} bytes; send less", code="request_too_large", param=None
            )


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` that gives the body, and afterwards what there is, which is the client's disconnection."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receiving() -> Message:
        nonlocal message
        if message is None:
            return await receive()
        first, message = message, None
        return first

    return receiving


async def _refuse_and_linger(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answer, and then let the client go on for a moment: closing at once would reset the connection, and the answer
    would be lost on those who only read it after they have sent everything."""
    error.headers["connection"] = "close"

    async def hold(message: Message) -> None:
        if message["type"] != "http.response.body":
            return await send(message)
        await send({**message, "more_body": True})
        with move_on_after(LINGER_S):
            while (incoming := await receive())["type"] == "http.request" and incoming.get("more_body", False):
                pass
        return await send({"type": "http.response.body", "body": b"", "more_body": False})

    await refuse(scope, receive, hold, error)


def value_of(content: bytes) -> Any:
    """The value that JSON is. Of a large one each number is a call of Python's, between which other threads have their
    turn; without, numbers are read faster. Raises ValueError: it is none; ApiError: an object has a name twice."""
    return json.loads(content, object_pairs_hook=_once, **(_NUMBERS if len(content) > LARGE else {}))


def _integer(digits: str) -> int:
    return int(digits)


def _fraction(digits: str) -> float:
    return float(digits)


_NUMBERS: dict[str, Any] = {"parse_int": _integer, "parse_float": _fraction, "parse_constant": _fraction}


def check_json(content: bytes) -> Any:
    """The value that a body is, or None if it is no JSON, which is for another parser to say.

    JSON is refused that is too deep or has too many values, before a parser spends memory on it, or that holds half of
    an escaped character, which nobody could send back; and so are names that an object has twice.
    """
    if b"\0" in content:  # UTF-16, which Python's parser would read, and this one would count wrongly
        raise ApiError(400, "the body holds a zero byte, expected JSON in UTF-8")
    brackets = content.count(b"[") + content.count(b"{")
    if brackets > DEEPEST or content.count(b",") >= MOST_VALUES or content.count(b'"') > 2 * MOST_PARTS:
        _check_shape(content)  # most bodies have less, also counting what stands in texts
    try:
        value = value_of(content)
    except (ValueError, RecursionError):
        return None
    if _HALF.search(content):
        _check_characters(value)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these members. A name that it has twice is refused: one of the two values would count for nothing.
    Raises ApiError: 400, naming it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = printable(next(name for name, count in counts.items() if count > 1)[:40])
        raise ApiError(400, f"{twice} is given twice in one object; leave one of them out", param=twice)
    return found


def _check_characters(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            said = "the body holds half of a character (a lone surrogate, as \\ud800); send whole ones"
            raise ApiError(400, said) from error
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_characters(name)
            _check_characters(item)
    elif isinstance(value, list):
        for item in value:
            _check_characters(item)


def _check_shape(content: bytes) -> None:
    """Count what stands outside of texts, piece by piece: each ends after a quote, which is amid no escape."""
    marks, inside, quotes, start = bytearray(), False, 0, 0
    while start < len(content):
        end = content.find(b'"', start + PIECE) + 1 or len(content)
        parts = content[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        marks += b"".join(parts[inside::2]).translate(_BRACKETS, _OTHERS)
        inside ^= len(parts) % 2 == 0
        quotes, start = quotes + len(parts) - 1, end
        if len(marks) > MOST_VALUES:
            raise ApiError(400, f"the body has more than {MOST_VALUES} values; send less", code="request_too_large")
        if quotes > 2 * MOST_PARTS:
            raise ApiError(400, f"the body has more than {MOST_PARTS} texts; send less", code="request_too_large")
    levels = bytes(marks).replace(b",", b"")
    if len(levels) > 2 * MOST_PARTS:
        said = f"the body has more than {MOST_PARTS} arrays and objects; send less"
        raise ApiError(400, said, code="request_too_large")
    for _ in range(DEEPEST):  # each round takes the innermost level away
        levels = levels.replace(b"[]", b"")
    if b"[]" in levels or levels.count(b"[") > DEEPEST:
        raise ApiError(400, f"the body nests arrays and objects more than {DEEPEST} levels deep; flatten it")
