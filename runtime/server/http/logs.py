"""The log of the service: a line for each request, with its id and never its text, and whatever else logs beside it."""

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import LlmcError, printable
from llmc.runtime.api.handle import Handle
from llmc.runtime.observe.logs import JsonFormatter, event, fields_of
from llmc.runtime.server.http.call import Call, call_of

log = logging.getLogger(__name__)

LOGGED_BYTES = 64 << 10  # of what is received, and of what is sent, where they are logged on purpose
LEVELS = {"llmc": logging.INFO, "uvicorn": logging.INFO, "llmc.runtime.engine.output_processor": logging.WARNING}
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
# Requests of supervisors, every few seconds each: their lines would bury the others.
QUIET = frozenset({"/health", "/ready", "/metrics"})


def costs_of(handles: Sequence[Handle]) -> dict[str, int | float | None]:
    """Tokens of what was submitted, of what failed or was left those so far, and the time to the first one."""
    if not handles:
        return {}
    prompt, cached, output, first = 0, 0, 0, None
    for handle in handles:
        try:
            result = handle.result(0) if handle.done else None
        except LlmcError:
            result = None
        if result is None:
            prompt += handle.prompt_tokens
            output += len(handle.token_ids)
        else:
            prompt += result.usage.prompt_tokens
            cached += result.usage.cached_tokens
            output += result.usage.completion_tokens
            first = result.metrics.ttft_s if first is None else first
    seconds = None if first is None else round(first, 6)
    return {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output, "ttft_s": seconds}


class RequestLog:
    """Write a line for each request once it has ended; the outermost of all.

    Fields: ``request_id``, ``key`` (its name), ``method``, ``route`` (the pattern, as the path may hold anything),
    ``status``, ``model``, ``user``, ``safety_identifier`` and ``metadata`` (as the client gives them),
    ``prompt_tokens``, ``cached_tokens``, ``output_tokens``, ``ttft_s``, ``duration_s``, and of what went to an upstream
    ``answered_by``, ``upstream_model``, ``upstream_reason`` and ``upstream_failure``. Errors that nobody foresaw are
    logged with the place where they happened, and without their message, which may quote the request. ``bodies``:
    write what is received and sent too, 64 KiB of each, and messages of errors.
    """

    def __init__(self, app: ASGIApp, *, bodies: bool = False) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        call, start = call_of(scope), time.perf_counter()
        receive, send = self._record_bytes(call, receive, send)
        try:
            await self._app(scope, receive, _note_status(call, send))
        except Exception as error:  # noqa: BLE001 - written here with the request's id; the framework has answered
            call.fields.setdefault("status", 500)
            self._log_failure(scope, error)
        finally:
            _write(scope, call, time.perf_counter() - start)

    def _record_bytes(self, call: Call, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Wrap both so that the call gets their bytes, if bodies are logged."""
        if not self._bodies:
            return receive, send

        def write_down(name: str, message: Message) -> None:
            data = message.get("body", b"").decode("utf-8", "replace")
            call.fields[name] = (call.fields.get(name, "") + data)[:LOGGED_BYTES]

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
        fields = {"request_id": scope["state"].get("request_id"), "error": type(error).__name__, "said": said}
        event(log, "request failed", level=logging.ERROR, **_drop_missing(fields), traceback=place)


def _note_status(call: Call, send: Send) -> Send:
    async def send_noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.fields["status"] = message["status"]
        await send(message)

    return send_noted


def _write(scope: Scope, call: Call, seconds: float) -> None:
    # The route's pattern, since a path may hold anything; guards around the application do not see it.
    call.fields.setdefault("route", getattr(scope.get("route"), "path", None))
    fields = {
        "request_id": scope["state"].get("request_id"),
        "key": call.client.name,
        "method": scope["method"],
        **call.fields,
        **costs_of(call.client.handles),
        "duration_s": round(seconds, 6),
    }
    status = call.fields.get("status", 499)  # nginx's number where the client left before the answer began
    quiet = call.fields.get("route") in QUIET and status < 500
    event(log, "request", level=logging.DEBUG if quiet else logging.INFO, **_drop_missing({**fields, "status": status}))


def _drop_missing(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# ------------------------------------------------------------------------------------------------------ where it goes


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, message, and the fields of the event as ``name=value``.

    What clients wrote is part of its line and of its field: a value of more than one plain word is a text of JSON, ends
    of lines are escapes, and lines of a traceback are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(fields_of(record))
        traces = [str(fields.pop("traceback", ""))]
        if record.exc_info:
            traces.append(self.formatException(record.exc_info))
        named = " ".join(f"{name}={_show_value(value)}" for name, value in fields.items())
        message = printable(record.getMessage()).replace("\n", "\\n")
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {message} {named}".rstrip()
        return "\n".join([line, *(f"  {each}" for trace in traces for each in printable(trace).splitlines())])


def _show_value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(value, default=str)


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
