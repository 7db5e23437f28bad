"""uvicorn's HTTP/1.1 with the limits that it lacks: on the size of headers, and on the time for them."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.errors import ApiError, response


class LimitedProtocol(HttpToolsProtocol):
    """One connection; :func:`make_limited_protocol` makes a class with settings."""

    limits: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._received = 0  # bytes since the headers began
        self._for_headers: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, unless the headers have become too long or the connection is to be closed."""
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._received += len(data)
        super().data_received(data)
        if self._in_headers and self._received > self.limits.max_header_bytes:
            most = self.limits.max_header_bytes
            self._refuse(
                ApiError(431, f"the headers have more than {most} bytes; send fewer", code="headers_too_large")
            )
        elif self._is_idle() and not self.transport.is_closing():
            self._await_headers()  # for uvicorn has stopped counting the time of an idle connection

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._headers_done()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's headers."""
        super().on_message_complete()
        self._in_headers = True
        self._received = 0

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

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"{msg} Expected HTTP/1.1."))

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, whose path would tell the dialect, and close."""
        if self._is_idle() and not self.transport.is_closing():
            answer = response({}, error)
            lines = [STATUS_LINE[error.status].rstrip(b"\r\n")]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        self.transport.close()


def make_limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """uvicorn's ``http`` with the limits of the settings."""
    return type("Limited", (LimitedProtocol,), {"limits": config})
