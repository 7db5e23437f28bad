"""uvicorn's HTTP/1.1 with the limits that it lacks: on headers, on the time for them, on slow readers, on connections.

Uvicorn closes idle connections, holds back clients that send faster than the application reads, and pings WebSockets.
It waits for ever for a request's first line and headers, takes any amount of them, and waits for ever for a client that
does not read its answer.
"""

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.errors import ApiError, response

SPARE_FILES = 256  # descriptors for anything but connections: bundles, logs, the event loop


class LimitedProtocol(HttpToolsProtocol):
    """One connection; :func:`limited_protocol` makes a class with settings."""

    limits: ServerConfig
    most: int  # connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._received = 0  # bytes since the headers began
        self._refusal: ApiError | None = None
        self._for_headers: asyncio.TimerHandle | None = None
        self._for_reading: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------- connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or refuse where as many connections as may be are open."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            said = f"{self.most} connections are open; close some, or try again later"
            self._refuse(ApiError(503, said, retry_after_s=1))
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._headers_done()
        self.resume_writing()
        super().connection_lost(exc)

    # ------------------------------------------------------------------------------------------------------ headers

    def data_received(self, data: bytes) -> None:
        """Parse it, unless the headers have become too long or the connection is to be closed."""
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._received += len(data)
        super().data_received(data)
        if self._in_headers and self._received > self.limits.max_header_bytes:
            self._refuse(self._too_large())
        elif self._is_idle() and not self.transport.is_closing():
            self._await_headers()  # for uvicorn has stopped counting the time of an idle connection

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count them as they come."""
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refusal = ApiError(
                431,
                f"the request has more than {self.limits.max_headers} headers; send fewer",
                code="headers_too_large",
            )
            raise ValueError  # ends the parser, and uvicorn answers with send_400_response

    def on_headers_complete(self) -> None:
        """Start the application, if they are short enough."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = self._too_large()
            raise ValueError
        self._in_headers = False
        self._headers_done()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's headers."""
        super().on_message_complete()
        self._in_headers = True
        self._received = 0

    def _too_large(self) -> ApiError:
        most = self.limits.max_header_bytes
        return ApiError(431, f"the headers have more than {most} bytes; send fewer", code="headers_too_large")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        """They must be complete in time, also where a byte comes now and then: the time is not set anew."""
        if self._for_headers is None:
            self._for_headers = self.loop.call_later(self.limits.header_timeout_s, self._headers_late)

    def _headers_done(self) -> None:
        if self._for_headers is not None:
            self._for_headers.cancel()
            self._for_headers = None

    def _headers_late(self) -> None:
        self._for_headers = None
        seconds = self.limits.header_timeout_s
        if self._received:
            self._refuse(ApiError(408, f"the headers were not there after {seconds:g} s", code="timeout"))
        else:
            self.transport.close()

    # ---------------------------------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or beyond a limit."""
        self._refuse(self._refusal or ApiError(400, f"{msg} Expected HTTP/1.1."))

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, whose path would tell the dialect, and close."""
        if self._is_idle() and not self.transport.is_closing():
            answer = response({}, error)
            lines = [STATUS_LINE[error.status].rstrip(b"\r\n")]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        self.transport.close()

    # ------------------------------------------------------------------------------------------------ slow readers

    def pause_writing(self) -> None:
        """Give a client that does not read some time."""
        super().pause_writing()
        if self._for_reading is None:
            self._for_reading = self.loop.call_later(self.limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        if self._for_reading is not None:
            self._for_reading.cancel()
            self._for_reading = None
        super().resume_writing()


def limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """uvicorn's ``http`` with the limits of the settings."""
    return type("Limited", (LimitedProtocol,), {"limits": config, "most": connection_limit(config)})


def connection_limit(config: ServerConfig) -> int:
    """Connections that may be open, for which this process may need to be allowed more files than it is now."""
    if sys.platform == "win32":
        return config.max_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return config.max_connections if soft == resource.RLIM_INFINITY else min(config.max_connections, soft - SPARE_FILES)
