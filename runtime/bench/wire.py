"""HTTP/1.1 for event streams, with the moment at which each event came; cheap enough not to measure itself.

asyncio moves the bytes and httptools parses them, both of which the extra ``serve`` brings (uvloop too, where there is
one). General clients put several layers of asynchronous iterators between the socket and an event, which at eight
streams takes two to five times as long; runtime/server/README.md has the figures.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from llmc.errors import UsageError, require

PORTS = {"http": 80, "https": 443}
KEPT = 64 << 10  # bytes of an answer that is no event stream
Listener = Callable[[float, bytes], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The reason why a request has no whole answer: a kind to count by, and the words of this case."""

    kind: str
    message: str


@dataclass(eq=False)
class Reply:
    """An answer: its status (0: none came), headers in lower case, and of what is no event stream the first bytes.

    ``failure`` tells why it is not whole; an answer with an error's status is whole.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    failure: Failure | None = None


@dataclass(frozen=True)
class Server:
    """An address: host and port, the path that all others follow, the headers of each request, TLS if there is some."""

    host: str
    port: int
    base: str
    headers: tuple[tuple[str, str], ...] = ()
    tls: ssl.SSLContext | None = None

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = [("Host", f"{host}:{self.port}"), ("Content-Length", str(len(body))), *self.headers]
        if body:
            fields.append(("Content-Type", "application/json"))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{method} {self.base}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def server_at(url: str, key: str | None = None, ca_file: Path | None = None) -> Server:
    """Read a URL such as ``http://localhost:8000``; ``/v1`` is added where it ends in no such part.

    Args:
        url: of the server, or of its API.
        key: the API key, sent as a bearer token.
        ca_file: certificates (PEM) to trust in place of the system's.

    Raises:
        UsageError: the URL, the key or the certificates are none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL: {error}; expected for example http://localhost:8000") from error
    if not port or not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is no URL of a server; expected for example http://localhost:8000")
    if key is not None and (not key or not key.isascii() or not key.isprintable()):
        raise UsageError("the API key is empty, or has characters that no header may have")
    path = parts.path.rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    try:
        tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"{ca_file}: {error}; expected certificates in PEM") from error
    return Server(parts.hostname, port, base, headers, tls)


class EventReader:
    """The data of server-sent events from pieces of a stream; comments (heartbeats) and other fields are left out.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found


class Connection(asyncio.Protocol):
    """A connection that carries one exchange after the other."""

    def __init__(self) -> None:
        self.open = True
        self._ended: asyncio.Future[bool] | None = None  # its result: whether the connection may be used again
        self._reply = Reply()

    async def exchange(self, request: bytes, reply: Reply, listener: Listener | None) -> bool:
        """Send a request and fill ``reply``; true if the connection can carry another one."""
        self._parser = require("httptools", "serve").HttpResponseParser(self)
        self._reply, self._listener, self._events = reply, listener, EventReader()
        self._stream = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._ended

    def abort(self) -> None:
        """Close it now, whatever is under way."""
        self._transport.abort()

    # ------------------------------------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._ended is None or self._ended.done():  # nobody asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - the parser has a family of them, and they are the server's doing
            self._end(Failure("malformed HTTP", f"{type(error).__name__}: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(Failure("connection lost", str(exc) if exc else "the server closed it before the answer's end"))

    def _end(self, failure: Failure | None, again: bool = False) -> None:
        if self._ended is not None and not self._ended.done():
            self._reply.failure = failure
            self._ended.set_result(again)

    # ---------------------------------------------------------------------------------------- called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        kind = self._reply.headers.get("content-type", "")
        self._stream = self._reply.status == 200 and kind.startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if self._stream and self._listener is not None:
            for event in self._events.feed(body):
                self._listener(self._now, event)
        elif len(self._reply.body) < KEPT:
            self._reply.body += body

    def on_message_complete(self) -> None:
        self._end(None, bool(self._parser.should_keep_alive()))


class Client:
    """Requests to one server, over connections that are kept where the server keeps them; ``timeout_s`` for each."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self.server, self.timeout_s = server, timeout_s
        self._idle: list[Connection] = []

    async def send(self, method: str, path: str, body: bytes = b"", listener: Listener | None = None) -> Reply:
        """Send a request, give ``listener`` each event as it comes; a failure is told by the reply, not raised."""
        reply = Reply()
        try:
            await asyncio.wait_for(self._send(self.server.request(method, path, body), reply, listener), self.timeout_s)
        except asyncio.TimeoutError:
            reply.failure = Failure("timeout", f"no whole answer after {self.timeout_s:g} s")
        except OSError as error:
            reply.failure = Failure("no connection", str(error) or type(error).__name__)
        return reply

    async def _send(self, request: bytes, reply: Reply, listener: Listener | None) -> None:
        kept = await self._exchange(self._reusable(), request, reply, listener)
        if kept and not reply.status and reply.failure is not None:  # the server had just given the connection up
            reply.failure = None
            await self._exchange(None, request, reply, listener)

    async def _exchange(
        self, connection: Connection | None, request: bytes, reply: Reply, listener: Listener | None
    ) -> bool:
        """True if the connection had been used before."""
        kept = connection is not None
        if connection is None:
            loop, server = asyncio.get_running_loop(), self.server
            _, connection = await loop.create_connection(Connection, server.host, server.port, ssl=server.tls)
        try:
            if await connection.exchange(request, reply, listener):
                self._idle.append(connection)
            else:
                connection.abort()
        except asyncio.CancelledError:
            connection.abort()
            raise
        return kept

    def _reusable(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().abort()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where it is installed, which halves the cost of an event, or else on asyncio's loop."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(main)
    return uvloop.run(main)
