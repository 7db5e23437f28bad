"""Requests that browsers send for foreign pages: the names that this service goes by, and the origins it serves.

Any web page can make its visitor's browser send requests to the visitor's own machine. Where no key is asked for, it
would be served: under a name of its own that it lets point to 127.0.0.1 (DNS rebinding), or with a form.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.config import ServerConfig, is_local
from llmc.runtime.server.http.errors import ApiError, refuse

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
EXPOSED = ("x-request-id", "retry-after", "x-ratelimit-*", "x-llmc-answered-by", "x-llmc-upstream-model")


class Origins:
    """Refuse what was sent to another name than the service's, and requests of foreign pages where no key tells them
    from the user's own."""

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
