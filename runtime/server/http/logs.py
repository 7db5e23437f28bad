"""The log of the service: a line for each request, with its id and never its text, and whatever else logs beside it."""

import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import LlmcError
from llmc.runtime.api.handle import Handle
from llmc.runtime.observe.tracing import JsonFormatter, continue_trace, event, fields_of

log = logging.getLogger(__name__)

LOGGED_BYTES = 64 << 10  # of what is received, and of what is sent, where they are logged on purpose
LEVELS = {"llmc": logging.INFO, "uvicorn": logging.INFO, "llmc.runtime.engine.output_processor": logging.WARNING}
# Requests of supervisors, every few seconds each: their lines would bury the others.
QUIET = frozenset({"/health", "/ready", "/metrics"})


@dataclass
class Costs:
    """Tokens of what was submitted and has ended, and the time to the first one."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None

    def add(self, handle: Handle) -> None:
        """Count one in; of what failed or was left, the tokens that were read."""
        try:
            result = handle.result(0) if handle.done else None
        except LlmcError:
            result = None
        if result is None:
            self.prompt_tokens += handle.prompt_tokens
            self.output_tokens += len(handle.token_ids)
            return
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.output_tokens += result.usage.completion_tokens
        if self.ttft_s is None and result.metrics.ttft_s is not None:
            self.ttft_s = round(result.metrics.ttft_s, 6)


@dataclass(eq=False)
class Record:
    """A request as far as it is known while it is answered; fields whose value is None are not written."""

    fields: dict[str, Any] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    costs: Costs | None = None

    def watch(self, handle: Handle) -> None:
        """Count what has ended, for a WebSocket may bring any number of requests, and keep what runs."""
        self.settle([one for one in self.handles if one.done])
        self.handles.append(handle)

    def settle(self, handles: list[Handle]) -> None:
        self.costs = self.costs or (Costs() if handles else None)
        for handle in handles:
            assert self.costs is not None
            self.costs.add(handle)
        self.handles = [handle for handle in self.handles if handle not in handles]


_RECORD: ContextVar[Record | None] = ContextVar("llmc_request", default=None)


def note(**fields: Any) -> None:
    """Write these fields in the line of the request that this task answers; nothing happens outside of one."""
    if (record := _RECORD.get()) is not None:
        record.fields.update(fields)


def watch(handle: Handle) -> None:
    """Write the tokens and times of what was submitted in the line of the request that this task answers."""
    if (record := _RECORD.get()) is not None:
        record.watch(handle)


def route_noted(app: ASGIApp) -> ASGIApp:
    """Note the pattern of the route that the application found, which guards around it do not see."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if (path := getattr(scope.get("route"), "path", None)) is not None:
                note(route=path)

    return call


class RequestLog:
    """Write a line for each request, or connection of a WebSocket, once it has ended; the outermost of all.

    Fields: ``request_id``, ``key`` (its name), ``method``, ``route`` (the pattern, as the path may hold anything),
    ``status``, ``model``, ``user``, ``safety_identifier`` and ``metadata`` (as the client gives them),
    ``prompt_tokens``, ``cached_tokens``, ``output_tokens``, ``ttft_s``, ``duration_s``, and of what went to an upstream
    ``answered_by``, ``upstream_model``, ``upstream_reason`` and ``upstream_failure``. Errors that nobody foresaw are
    logged with the place where they happened, and without their message, which may quote the request. A trace that the
    request continues (``traceparent``) is continued, where OpenTelemetry is in use. ``bodies``: write what is received
    and sent too, 64 KiB of each, and messages of errors.
    """

    def __init__(self, app: ASGIApp, *, bodies: bool = False) -> None:
        self._app = app
        self._bodies = bodies
        self._sockets: set[Record] = set()

    @property
    def is_conversing(self) -> bool:
        """True while a request that came over a WebSocket runs."""
        return any(not handle.done for record in self._sockets for handle in record.handles)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        record, start = Record(), time.perf_counter()
        token = _RECORD.set(record)
        if scope["type"] == "websocket":
            self._sockets.add(record)
        receive, send = self._record_bytes(record, receive, send)
        try:
            with continue_trace(scope["headers"]):
                await self._app(scope, receive, _note_status(record, send))
        except Exception as error:  # noqa: BLE001 - written here with the request's id; the framework has answered
            record.fields.setdefault("status", 500)
            self._log_failure(scope, error)
        finally:
            _RECORD.reset(token)
            self._sockets.discard(record)
            _write(scope, record, time.perf_counter() - start)

    def _record_bytes(self, record: Record, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Wrap both so that the record gets their bytes, if bodies are logged."""
        if not self._bodies:
            return receive, send

        def write_down(name: str, message: Message) -> None:
            data = (message.get("text") or "").encode() or message.get("body") or b""
            before = record.fields.get(name, "")
            record.fields[name] = (before + data.decode("utf-8", "replace"))[:LOGGED_BYTES]

        async def receive_logged() -> Message:
            message = await receive()
            write_down("body", message)
            return message

        async def send_logged(message: Message) -> None:
            write_down("answer", message)
            await send(message)

        return receive_logged, send_logged

    def _log_failure(self, scope: Scope, error: Exception) -> None:
        said = str(error) if self._bodies else None
        place = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        fields = {"request_id": _state(scope, "request_id"), "error": type(error).__name__, "said": said}
        event(log, "request failed", level=logging.ERROR, **_drop_missing(fields), traceback=place)


def _note_status(record: Record, send: Send) -> Send:
    async def send_noted(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            record.fields["status"] = message["status"]
        elif message["type"] == "websocket.accept":
            record.fields["status"] = 101
        await send(message)

    return send_noted


def _write(scope: Scope, record: Record, seconds: float) -> None:
    record.settle(record.handles)
    fields = {
        "request_id": _state(scope, "request_id"),
        "key": _state(scope, "key_name"),
        "method": scope.get("method", "WEBSOCKET"),
        **record.fields,
        **(vars(record.costs) if record.costs else {}),
        "duration_s": round(seconds, 6),
    }
    status = record.fields.get("status", 499)  # nginx's number where the client left before the answer began
    quiet = record.fields.get("route") in QUIET and status < 500
    event(log, "request", level=logging.DEBUG if quiet else logging.INFO, **_drop_missing({**fields, "status": status}))


def _state(scope: Scope, name: str) -> Any:
    return scope.get("state", {}).get(name)


def _drop_missing(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# ------------------------------------------------------------------------------------------------------ where it goes


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, message, and the fields of the event as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        named = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {record.getMessage()} {named}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@contextmanager
def log_to_stderr(form: str | None) -> Iterator[None]:
    """Write what llmc and uvicorn log, from INFO on, to stderr: ``json``, a line each, or ``text``; by default the
    latter where a person reads it, at a terminal.

    Other packages' warnings are written too. The engine's own line for each request is not: there is one already.
    """
    form = form or ("text" if sys.stderr.isatty() else "json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root, before = logging.getLogger(), {name: logging.getLogger(name).level for name in LEVELS}
    root.addHandler(handler)
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        root.removeHandler(handler)
