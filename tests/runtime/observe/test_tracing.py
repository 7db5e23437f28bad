"""Log lines that parse, and spans that follow the conventions for generative AI."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes

from llmc.runtime.observe.metrics import EngineMetrics, RequestTimeline
from llmc.runtime.observe.tracing import JsonFormatter, current_context, event, record_spans

SECOND = 1_000_000_000
ROUNDING_NS = 1_000  # of doubles near the uptime of a machine

# ---------------------------------------------------------------------------------------------------------------- logs


class Lines(logging.Handler):
    """Keeps what the formatter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.append(self.format(record))

    def last(self) -> dict[str, object]:
        def refuse(constant: str) -> object:
            raise ValueError(f"{constant} is not JSON")

        line = json.loads(self.lines[-1], parse_constant=refuse)
        assert isinstance(line, dict)
        return line


@pytest.fixture
def logger() -> logging.Logger:
    """One of this test alone, which nobody else hears."""
    logger = logging.Logger("llmc.test", logging.INFO)
    logger.addHandler(Lines())
    return logger


@pytest.fixture
def lines(logger: logging.Logger) -> Lines:
    return logger.handlers[0]


def test_an_event_is_one_line_of_json(logger: logging.Logger, lines: Lines):
    event(logger, "request finished", request_id="r1", ttft_s=0.25, tokens=7, cached=True, reason=None)
    line = lines.last()
    time = line.pop("time")
    assert line == {
        "level": "INFO",
        "logger": "llmc.test",
        "message": "request finished",
        "request_id": "r1",
        "ttft_s": 0.25,
        "tokens": 7,
        "cached": True,
        "reason": None,
    }
    assert len(time) == len("2026-01-02T03:04:05.678901+00:00")
    assert time.endswith("+00:00")


def test_what_json_lacks_becomes_text(logger: logging.Logger, lines: Lines):
    event(logger, "x", path=Path("a"), fine=[1])
    line = lines.last()
    assert (line["path"], line["fine"]) == ("a", [1])


# --------------------------------------------------------------------------------------------------------------- spans


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A tracer provider of the application, for this test only; the real one can be set once in a process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def timeline(reason: str = "stop", admitted: bool = True, tokens: bool = True) -> RequestTimeline:
    """1 s in the queue, 2 s of prefill, 3 s of decode; then it ended."""
    now = [100.0]
    line = EngineMetrics(lambda: now[0]).timeline(12)
    if admitted:
        now[0] = 101.0
        line.admit(cached_tokens=8)
    if tokens:
        now[0] = 103.0
        line.token()
        now[0] = 105.5
        line.token(count=4)
    now[0] = 106.0
    line.finish(reason)
    return line


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan, line: RequestTimeline) -> tuple[float, float]:
    """Start and end since the request was queued, to a microsecond."""
    return tuple(round((at - line.queued_unix_ns) / SECOND, 6) for at in (span.start_time, span.end_time))


def test_a_request_has_a_span_and_a_child_for_each_phase(exporter: InMemorySpanExporter):
    line = timeline()
    record_spans(line, model="tiny")
    made = spans(exporter)
    assert {name: seconds(span, line) for name, span in made.items()} == {
        "queue": (0, 1),
        "prefill": (1, 3),
        "decode": (3, 6),
        "text_completion tiny": (0, 6),
    }
    request = made.pop("text_completion tiny")
    assert request.parent is None
    assert request.kind is trace.SpanKind.INTERNAL
    assert {span.parent.span_id for span in made.values()} == {request.context.span_id}
    assert request.status.is_unset


def test_attributes_are_those_of_the_conventions(exporter: InMemorySpanExporter):
    line = timeline("length")
    line.draft(6, 4)
    record_spans(line, model="tiny")
    attributes = dict(spans(exporter)["text_completion tiny"].attributes)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(3.0)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "llmc",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "llmc.draft.proposed_tokens": 6,
        "llmc.draft.accepted_tokens": 4,
    }


def strangers(span: ReadableSpan) -> set[str]:
    """Attributes that the conventions do not define."""
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)} | {
        error_attributes.ERROR_TYPE
    }
    return {name for name in span.attributes if name not in known and not name.startswith("llmc.")}


def test_opentelemetrys_own_list_has_every_attribute(exporter: InMemorySpanExporter):
    record_spans(timeline("error"), model="tiny")
    assert strangers(spans(exporter)["text_completion tiny"]) == set()


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "error"])
def test_a_request_that_failed_says_why(exporter: InMemorySpanExporter, reason: str):
    record_spans(timeline(reason), model="tiny")
    span = spans(exporter)["text_completion tiny"]
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, reason)
    assert span.attributes["error.type"] == reason


def test_phases_that_were_not_reached_have_no_span(exporter: InMemorySpanExporter):
    waited = timeline("cancelled", admitted=False, tokens=False)
    record_spans(waited, model="waited")
    assert {name: seconds(span, waited) for name, span in spans(exporter).items()} == {
        "queue": (0, 6),
        "text_completion waited": (0, 6),
    }
    exporter.clear()
    fed = timeline("deadline", tokens=False)
    record_spans(fed, model="fed")
    assert seconds(spans(exporter)["prefill"], fed) == (1, 6)
    assert "decode" not in spans(exporter)


def test_the_clients_span_is_the_parent(exporter: InMemorySpanExporter):
    with trace.get_tracer_provider().get_tracer("client").start_as_current_span("client") as client:
        parent = current_context()
    record_spans(timeline(), model="tiny", parent=parent)
    request = spans(exporter)["text_completion tiny"]
    assert request.parent.span_id == client.get_span_context().span_id
    assert request.context.trace_id == client.get_span_context().trace_id


@pytest.mark.parametrize("provider", [trace.ProxyTracerProvider(), trace.NoOpTracerProvider()])
def test_without_a_configured_provider_nothing_is_made(monkeypatch: pytest.MonkeyPatch, provider: trace.TracerProvider):
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(type(provider), "get_tracer", lambda *_: pytest.fail("a tracer was asked for"))
    record_spans(timeline(), model="tiny")


def test_opentelemetry_is_never_imported_for_an_application_that_does_not_use_it():
    program = """
import sys
from pathlib import Path
from llmc.runtime.observe import tracing
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.observe.tracing import current_context, record_spans
line = EngineMetrics().timeline(1)
line.finish("stop")
assert current_context() is None
record_spans(line, model="tiny")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
