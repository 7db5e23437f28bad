"""The guards around the application, in their order, and what uvicorn must be told."""

import logging
import re
import secrets
from typing import Any
from urllib.parse import urlsplit

import httptools
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from llmc.runtime.server.config import ServerConfig, is_local
from llmc.runtime.server.http.arrival import Bodies
from llmc.runtime.server.http.call import call_of
from llmc.runtime.server.http.errors import ApiError, refuse
from llmc.runtime.server.http.keys import Keyring
from llmc.runtime.server.http.rates import Rates

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
EXPOSED = ("x-request-id", "retry-after", "x-ratelimit-*", "x-llmc-answered-by", "x-llmc-upstream-model")
ANSWERED_BY = "x-llmc-answered-by"  # where there is an upstream, which may have done so
MOST_HEADERS = 32 << 10  # bytes, a request's first line included
IDLE_S = 75  # that a connection may stay open between requests: longer than proxies keep theirs
SOCKET = "/v1/responses"  # the address that takes WebSockets
OFFER = "llmc.offer"  # key of the scope of a request that is a WebSocket's handshake
GOING_DOWN = "llmc.going_down"  # type of the message, among those of ASGI, with which a WebSocket's server goes down
SLICE = 16 << 10  # bytes received that are parsed as frames of a WebSocket in one call
MOST_FRAMES = 256  # in them; forty thousand empty ones, which one read may bring, would hold everybody up
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class Guarded:
    """The application behind its guards. Raises UsageError: the file of keys cannot be used."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._unguarded = app
        self._keyring = None if config.keys_file is None else Keyring(config.keys_file)
        app = accept_offers(app)
        app = Bodies(app, config)  # the innermost: nobody who is refused for another reason makes us read a body
        app = Rates(app, config)  # of the key that was found
        app = Keys(app, config, self._keyring)
        app = cors(app, config)  # outside of keys: a preflight brings none, and a page is to read why it was refused
        app = Origins(app, config)  # outside of cors, which answers preflights of allowed origins only
        self._app = name_requests(app, config.upstream is not None)  # the outermost: refusals have one too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._unguarded(scope, receive, send)
        else:  # one that comes through Ray's proxies, which bound none of its messages
            await send({"type": "websocket.close"})

    def reload(self) -> None:
        """Read the keys anew; where their file cannot be used, those before stay. Raises UsageError: it cannot."""
        if self._keyring is not None:
            self._keyring.reload()


class Origins:
    """Refuse requests that were sent to another name than the service's, and those of foreign pages where no key tells
    them from the user's own.

    Any web page can make its visitor's browser send requests to the visitor's own machine. Where no key is asked for,
    it would be served: under a name of its own that it lets point to 127.0.0.1 (DNS rebinding), or with a form.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._names = host_names(config)
        self._asks_for_keys = config.keys_file is not None
        self._allowed = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(Headers(scope=scope))
        except ApiError as error:
            return await refuse(scope, receive, send, error)
        return await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._names is not None and _name(host) not in self._names:
            said = f"Host is {host[:100]!r}, expected one of {', '.join(sorted(self._names))}; see allowed_hosts"
            raise ApiError(400, said, code="unknown_host")
        if origin is None or self._asks_for_keys:
            return
        if origin not in self._allowed and not _same(origin, host):
            said = f"a page of {origin[:100]!r} sent this, expected this service's own; see cors_origins"
            raise ApiError(403, said, code="foreign_origin")


def host_names(config: ServerConfig) -> frozenset[str] | None:
    """The names that the service answers to; None: any, as a key, or who may open a socket, decides instead."""
    if config.allowed_hosts:
        return None if "*" in config.allowed_hosts else frozenset(map(str.lower, config.allowed_hosts))
    if config.keys_file or config.unix_socket or not is_local(config.host):
        return None
    return frozenset({*LOCAL_NAMES, config.host.lower()})


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _same(origin: str, host: str) -> bool:
    """True if a page came from this service; a proxy may have added TLS, so that the scheme says nothing."""
    return origin.partition("://")[2].lower() == host.lower()


def cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Tell browsers of the origins whose pages may read answers; where there are none, tell them nothing."""
    if not config.cors_origins:
        return app
    return _Cors(
        app,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),  # the official clients send a dozen of their own
        allow_private_network=True,  # a page of the web may ask a service at home
        expose_headers=EXPOSED,
    )


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code != 200:  # of another origin
            del answer.headers["access-control-allow-private-network"]
        return answer


class Keys:
    """Ask for a key on every route but those that are open; without a file, on none.

    The call gets it; what was presented is removed from the headers, so that nothing behind can log it.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keyring: Keyring | None) -> None:
        self._app = app
        self._keyring = keyring
        self._page = config.page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        presented = take_key(scope)
        key = self._keyring.find(presented) if self._keyring and presented else None
        if self._keyring and key is None and not self._is_open(scope):
            found = "the API key is unknown" if presented else "there is no API key"
            message = f"{found}; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            return await refuse(scope, receive, send, error)
        call = call_of(scope)
        call.client.key = key
        call.has_admin = self._keyring is not None and self._keyring.has_admin
        return await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """True of liveness, and of the page, which must load before it can ask for a key."""
        if scope["method"] not in ("GET", "HEAD"):
            return False
        path = scope["path"]
        return path == "/health" or (self._page and (path == "/" or path.startswith("/page/")))


def take_key(scope: Scope) -> str:
    """The key that a client presented, as ``Authorization: Bearer`` or else ``x-api-key``; the request loses it."""
    headers = Headers(scope=scope)
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        presented = headers.get("x-api-key", "")
    secret = (b"authorization", b"x-api-key")
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in secret]
    return presented.strip()


def accept_offers(app: ASGIApp) -> ASGIApp:
    """Accept the handshake of a WebSocket, which all guards let through;
    :mod:`llmc.runtime.server.dialects.socket` goes on with it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get(OFFER):
            return await app(scope, receive, send)
        call_of(scope).note(route=SOCKET)
        await send({"type": "http.response.start", "status": 101, "headers": []})
        return await send({"type": "http.response.body", "body": b""})

    return call


def name_requests(app: ASGIApp, marks: bool) -> ASGIApp:
    """Give each request a name, its client's if it is a sane one, and send it back as X-Request-Id.
    ``marks``: say in a header of each answer who gave it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get("x-request-id", "")
        name = asked if _ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # The second as Anthropic's clients look for it.
                headers.update({"x-request-id": name, "request-id": name})
                if marks:
                    headers.setdefault(ANSWERED_BY, "box")
            await send(message)

        await app(scope, receive, send_named)

    return call


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's faster HTTP, which takes headers and trailers of any length, with a bound for them.

    They may be longer by what one read of the socket brings.
    """

    _waiting = 0  # bytes received since the last piece of a body, or the last request

    def data_received(self, data: bytes) -> None:
        self._waiting += len(data)
        super().data_received(data)
        if self._waiting > MOST_HEADERS and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MOST_HEADERS} bytes; send fewer.")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._waiting = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._waiting = 0

    def _should_upgrade_to_ws(self) -> bool:
        """True for a WebSocket's address while there is room; any other offer is declined, as if there were none."""
        most, used = self.limit_concurrency, max(len(self.connections), len(self.tasks))
        if self.parser.get_method() != b"GET" or (most is not None and used >= most):
            return False
        return httptools.parse_url(self.url).path == SOCKET.encode() and super()._should_upgrade_to_ws()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing of an offer of another protocol, which is declined; uvicorn would ask for a package."""


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket within limits, which lets running answers end when the server goes down."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It would log addresses with what clients write behind them, and a traceback for each frame that is no UTF-8.
        self.logger = self.conn.logger = logging.Logger("silent", logging.CRITICAL + 1)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if not self.close_sent or not start:
                super().data_received(data[start : start + SLICE])

    def handle_events(self) -> None:
        """Close a connection that sends more frames than bytes."""
        if len(self.conn.events) > MOST_FRAMES:
            self.conn.fail(CloseCode.POLICY_VIOLATION, "too many small frames")
            self.handle_parser_exception()
        else:
            super().handle_events()

    def handle_ping(self) -> None:
        """Answer, unless the client reads no answers: they would pile up."""
        answer = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(answer))

    def shutdown(self) -> None:
        queue: Any = self.queue
        if self.handshake_complete and not self.close_sent:
            queue.put_nowait({"type": GOING_DOWN})
        else:
            super().shutdown()


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Arguments of ``uvicorn.Config`` that hold connections within the limits."""
    return {
        "http": BoundedProtocol,
        "limit_concurrency": config.max_connections,
        "ws": SocketProtocol,
        "ws_max_size": config.max_body_bytes,
        "ws_ping_interval": config.heartbeat_s,
        "ws_per_message_deflate": False,  # what is compressed may be a thousand times as large as what was sent
        "timeout_keep_alive": IDLE_S,
        "server_header": False,
        "proxy_headers": False,  # what a client says of its own address is not believed
        "ssl_certfile": config.tls_cert,
        "ssl_keyfile": config.tls_key,
    }
