"""Logs that machines read, and spans of requests for OpenTelemetry.

A log line is one JSON object; a module writes it with :func:`event`, an application formats it with
:class:`JsonFormatter`. Spans are made once a request has ended, from its timeline, so nothing is paid while it runs;
and only where the application has configured a tracer provider (the extra ``tracing`` and an SDK). llmc itself
configures none, and sends nothing anywhere.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from llmc.runtime.observe.metrics import RequestTimeline

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

_FIELDS = "llmc_fields"  # attribute of a log record, unlike any that logging or others set
# Reasons to end that are the request's own; any other marks its span as failed.
_SUCCESSES = frozenset({"stop", "length"})
_NANOSECONDS = 1_000_000_000
_OPERATION = "text_completion"  # a request brings its chat as text


# ---------------------------------------------------------------------------------------------------------------- logs


def event(logger: logging.Logger, name: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log an event: its name is the message, and JsonFormatter writes its ``fields`` beside it."""
    logger.log(level, name, extra={_FIELDS: fields}, stacklevel=2)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The data of an event; empty for any other record."""
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON (RFC 8259, ASCII only).

    Keys: ``time`` (ISO 8601, UTC, microseconds), ``level``, ``logger``, ``message``, the fields of the event, and
    ``exception`` where there is one. Values that JSON does not know become text.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= fields_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# --------------------------------------------------------------------------------------------------------------- spans


def current_context() -> "Context | None":
    """The caller's trace, to be kept with its request and handed to :func:`record_spans`; None without OpenTelemetry.

    Called in the client's thread, for the engine's thread knows nothing of it.
    """
    api = sys.modules.get("opentelemetry.context")
    return None if api is None else api.get_current()


@contextmanager
def continue_trace(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
    """While the block runs, be in the trace that HTTP headers name (W3C's ``traceparent``, or what the application has
    configured); nothing happens where OpenTelemetry is not in use."""
    if _tracer() is None:
        yield
        return
    from opentelemetry import context, propagate

    carrier = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


def record_spans(timeline: RequestTimeline, *, model: str, parent: "Context | None" = None) -> None:
    """Make the spans of a request that has ended: the request, and in it ``queue``, ``prefill`` and ``decode``.

    Names and attributes follow the semantic conventions for generative AI
    (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/). A phase that the request did not reach has no
    span; one in which it ended lasts until then.

    ``parent`` is from :func:`current_context`, or None for the calling thread's own. There are none if no tracer
    provider is configured.
    """
    tracer = _tracer()
    if tracer is None or timeline.ended is None:
        return
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    def unix_ns(at: float) -> int:
        return timeline.queued_unix_ns + round((at - timeline.queued) * _NANOSECONDS)

    # The kind stays INTERNAL, the convention's for a model that runs in the caller's process.
    span = tracer.start_span(
        f"{_OPERATION} {model}", parent, attributes=_attributes(timeline, model), start_time=unix_ns(timeline.queued)
    )
    starts = (("queue", timeline.queued), ("prefill", timeline.admitted), ("decode", timeline.first_token))
    marks = [(name, at) for name, at in starts if at is not None]
    ends = [*(at for _, at in marks[1:]), timeline.ended]
    for (name, start), end in zip(marks, ends, strict=True):
        child = tracer.start_span(name, set_span_in_context(span), start_time=unix_ns(start))
        child.end(unix_ns(end))
    if timeline.finish_reason not in _SUCCESSES:
        span.set_attribute("error.type", str(timeline.finish_reason))
        span.set_status(Status(StatusCode.ERROR, timeline.finish_reason))
    span.end(unix_ns(timeline.ended))


def _tracer() -> "Tracer | None":
    """A tracer of the provider that the application has configured; without importing what it has not imported."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return None
    tracer: Tracer = provider.get_tracer("llmc")
    return tracer


def _attributes(timeline: RequestTimeline, model: str) -> dict[str, AttributeValue]:
    metrics = timeline.metrics()
    values: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": "llmc",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [str(metrics.finish_reason)],
        "gen_ai.response.time_to_first_chunk": metrics.ttft_s,
        "gen_ai.usage.input_tokens": metrics.prompt_tokens,
        "gen_ai.usage.output_tokens": metrics.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
        "llmc.draft.proposed_tokens": metrics.drafted or None,
        "llmc.draft.accepted_tokens": metrics.accepted if metrics.drafted else None,
        "llmc.context_overflows": metrics.overflows or None,
    }
    return {name: value for name, value in values.items() if value is not None}
