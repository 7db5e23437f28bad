"""The load test sends requests when they are due, waits for nobody, counts from there, and hides no failure."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from llmc.bundle import read_bundle
from llmc.errors import DeadlineError, LlmcError, QueueFullError, UsageError
from llmc.runtime import load
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.bench import client
from llmc.runtime.bench import load_test as module
from llmc.runtime.bench.arrivals import arrivals, due_times
from llmc.runtime.bench.client import Visit, send
from llmc.runtime.bench.load_test import LoadReport, Percentiles, figures, load_test
from llmc.runtime.engine.engine import Engine
from llmc.runtime.observe.metrics import RequestMetrics

REQUESTS = 6
PATIENCE = 120  # seconds after which a thread that waits counts as waiting for ever
METRICS = RequestMetrics(0.5, 0.0, None, None, None, None, None, 10, 0, 3, 0, 0, 0, "length")

# The mean of n exponential gaps has a relative standard deviation of 1 / sqrt(n): five of them for a fixed seed.
GAPS = 10_000
MEAN_TOLERANCE = 5 / GAPS**0.5
# Kolmogorov-Smirnov: the largest distance of n draws to their distribution exceeds 1.95 / sqrt(n) once in a thousand.
DISTANCE = 1.95 / GAPS**0.5


@pytest.fixture(scope="module")
def report(tiny_bundle: Path) -> LoadReport:
    return load_test(tiny_bundle, rate=200.0, requests=REQUESTS, prompt_length=12, new_tokens=5, threads=1, seed=3)


def distance_to_exponential(gaps: np.ndarray, rate: float) -> float:
    """The largest distance between the gaps' distribution function and the exponential one."""
    ordered = np.sort(gaps)
    expected = 1 - np.exp(-rate * ordered)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


# --------------------------------------------------------------------------------------------------------- arrivals


def test_gaps_between_arrivals_are_exponential_with_the_rate_asked_for():
    offsets = arrivals(GAPS + 1, 50.0, seed=0)
    gaps = np.diff(offsets)
    assert offsets[0] == 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=MEAN_TOLERANCE)
    assert distance_to_exponential(gaps, 50.0) < DISTANCE


def test_even_gaps_would_be_caught():
    assert distance_to_exponential(np.full(GAPS, 1 / 50), 50.0) > DISTANCE


def test_a_rate_off_by_a_tenth_would_be_caught():
    gaps = np.diff(arrivals(GAPS + 1, 55.0, seed=0))
    assert gaps.mean() != pytest.approx(1 / 50, rel=MEAN_TOLERANCE)


def test_arrivals_follow_from_the_seed():
    assert arrivals(20, 5.0, 1) == arrivals(20, 5.0, 1) != arrivals(20, 5.0, 2)


def test_even_arrivals_have_the_same_gap():
    due = due_times(4.0, 0, even=True)
    assert [next(due) for _ in range(4)] == [0.0, 0.25, 0.5, 0.75]


def test_without_a_rate_all_arrive_at_once():
    assert arrivals(3, None, 0) == [0.0, 0.0, 0.0]


def test_requests_are_sent_when_due_and_nobody_is_waited_for():
    """The second submission is slow; the third is late, sent at once, and still due when it was."""
    sent: list[int] = []

    def submit(index: int, visit: Visit) -> Any:
        sent.append(index)
        if index == 1:
            time.sleep(0.06)
        return SimpleNamespace()

    visits = send([0.0, 0.02, 0.04, 0.12], submit)
    assert sent == [0, 1, 2, 3]
    assert [visit.due - visits[0].due for visit in visits] == pytest.approx([0, 0.02, 0.04, 0.12])
    assert all(visit.sent >= visit.due for visit in visits)
    assert visits[2].sent - visits[2].due > 0.03


def test_a_request_that_is_turned_away_stops_no_other():
    def submit(index: int, visit: Visit) -> Any:
        if index == 0:
            raise QueueFullError("full")
        return SimpleNamespace()

    first, second = send([0.0, 0.0], submit)
    assert isinstance(first.error, QueueFullError)
    assert first.handle is None
    assert second.handle is not None


def test_any_other_exception_is_no_result():
    def submit(index: int, visit: Visit) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send([0.0], submit)


# ---------------------------------------------------------------------------------------------------------- figures


def visit(due: float, *tokens: float, late: float = 0.0, **metrics: Any) -> Visit:
    return Visit(due, due + late, list(tokens), metrics=dataclasses.replace(METRICS, **metrics))


def refused(due: float, error: LlmcError) -> Visit:
    return Visit(due, due, [], error=error)


def test_latencies_count_from_when_a_request_was_due():
    found = figures([visit(100.0, 103.0, 104.0, 106.0, late=2.0, queue_s=0.25)], 10)
    for name, expected in {"ttft": 3.0, "tpot": 1.5, "e2e": 6.0, "queue": 2.25}.items():
        assert found[name] == Percentiles(expected, expected, expected), name
    assert found["itl"] == Percentiles(1.5, pytest.approx(1.95), pytest.approx(1.99))


def test_percentiles_are_over_requests_and_gaps_over_all_tokens():
    visits = [visit(0.0, 1.0, 2.0), visit(1.0, 4.0, 4.0, 4.0)]
    found = figures(visits, 10)
    assert (found["ttft"].p50_s, found["e2e"].p50_s, found["tpot"].p50_s) == (2.0, 2.5, 0.5)
    assert found["itl"].p50_s == 0.0  # of 1, 0 and 0: two tokens came with one step


def test_throughput_is_of_what_was_completed_until_the_last_answer():
    visits = [visit(10.0, 11.0, 12.0), refused(11.0, QueueFullError("full")), visit(12.0, 13.0, 15.0)]
    found = figures(visits, 8)
    assert (found["completed"], found["rejected"], found["failed"], found["failure"]) == (2, 1, 0, None)
    assert (found["duration_s"], found["arrived_rate"]) == (5.0, 1.0)
    assert found["achieved_rate"] == pytest.approx(2 / 5)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 5)
    assert found["total_tokens_per_s"] == pytest.approx(20 / 5)


def test_failures_are_counted_and_the_first_is_shown():
    errors = [QueueFullError("full"), DeadlineError("too late"), DeadlineError("again")]
    found = figures([visit(0.0, 1.0, 2.0), *(refused(0.0, error) for error in errors)], 8)
    assert (found["completed"], found["rejected"], found["failed"], found["failure"]) == (1, 1, 2, "too late")
    assert found["arrived_rate"] is None  # all at once


def test_without_any_answer_the_first_error_is_raised():
    with pytest.raises(DeadlineError, match="too late"):
        figures([refused(0.0, DeadlineError("too late")), refused(0.0, QueueFullError("full"))], 8)


def test_draft_acceptance_is_of_all_answers():
    visits = [visit(0.0, 1.0, 2.0, drafted=3, accepted=1), visit(0.0, 1.0, 2.0, drafted=5, accepted=5)]
    assert figures(visits, 8)["draft_acceptance"] == 0.75
    assert figures([visit(0.0, 1.0, 2.0)], 8)["draft_acceptance"] is None


# ---------------------------------------------------------------------------------------------------- the real thing


def test_the_report_says_what_was_run(tiny_bundle: Path, report: LoadReport):
    manifest = read_bundle(tiny_bundle)
    assert (report.bundle, report.model, report.precision) == (str(tiny_bundle), manifest.source.name, "int8")
    assert (report.concurrency, report.rate, report.arrival_seed) == (manifest.limits.max_batch, 200.0, 3)
    assert (report.requests, report.prompt_length, report.new_tokens, report.threads) == (REQUESTS, 12, 5, 1)
    assert (report.determinism, report.draft, report.engine) == ("fast", None, "onnxruntime")
    assert report.max_queue == EngineOptions.max_queue


def test_every_request_is_answered_in_full(report: LoadReport):
    assert (report.completed, report.rejected, report.failed, report.failure) == (REQUESTS, 0, 0, None)
    assert report.output_tokens_per_s == pytest.approx(REQUESTS * 5 / report.duration_s)
    assert report.total_tokens_per_s == pytest.approx(REQUESTS * 17 / report.duration_s)


def test_the_latencies_fit_together(report: LoadReport):
    for figure in (report.ttft, report.tpot, report.itl, report.e2e, report.queue):
        assert 0 <= figure.p50_s <= figure.p95_s <= figure.p99_s
    assert report.queue.p50_s <= report.ttft.p50_s <= report.e2e.p50_s <= report.duration_s


def test_the_report_is_plain_data(report: LoadReport):
    names = [field.name for field in dataclasses.fields(LoadReport) if field.type is Percentiles]
    values = json.loads(json.dumps(dataclasses.asdict(report)))
    assert LoadReport(**{**values, **{name: Percentiles(**values[name]) for name in names}}) == report


def test_options_reach_the_engine(tiny_bundle: Path):
    report = load_test(
        tiny_bundle, requests=2, prompt_length=40, new_tokens=24, threads=1, draft="lookup", determinism="strict"
    )
    assert (report.draft, report.determinism, report.rate, report.arrived_rate) == ("lookup", "strict", None, None)


@pytest.mark.vnni
def test_the_report_says_how_many_rows_there_were_where_they_run_in_pairs(tiny_bundle: Path):
    report = load_test(
        tiny_bundle, concurrency=3, requests=2, prompt_length=4, new_tokens=2, threads=1, determinism="batch"
    )
    assert report.concurrency == 2


def test_a_full_queue_rejects(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    models: list[Any] = []
    monkeypatch.setattr(module, "load", lambda *given, **more: models.append(load(*given, **more)) or models[0])
    monkeypatch.setattr(client, "send", lambda *given: while_held(models[0].engine, lambda: send(*given)))
    report = load_test(tiny_bundle, requests=40, prompt_length=4, new_tokens=2, threads=1, max_queue=3)
    assert (report.completed, report.rejected, report.max_queue) == (3, 37, 3)


def test_a_queue_without_room_is_refused(tiny_bundle: Path):
    with pytest.raises(UsageError, match=r"max_queue is 0, expected 1 \.\.\. 1000000"):
        load_test(tiny_bundle, max_queue=0)


def while_held(engine: Engine, work: Callable[[], list[Visit]]) -> list[Visit]:
    """Do ``work`` while the engine's thread does nothing."""
    held, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=lambda: engine.call(lambda: held.set() or done.wait(PATIENCE)))
    holder.start()
    assert held.wait(PATIENCE)
    try:
        return work()
    finally:
        done.set()
        holder.join()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rate": 0}, "rate is 0, expected requests per second from 1e-06; leave it out, and all arrive at once"),
        ({"rate": 1e-300}, "rate is 1e-300, expected"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"concurrency": 0}, "concurrency is 0, expected an integer of at least 1"),
        ({"concurrency": 4096}, "concurrency is 4096, the bundle was built for"),
        ({"requests": 0}, "requests is 0"),
        ({"requests": 10**12}, "requests is 1000000000000, expected at most 1,000,000"),
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"new_tokens": 1}, "new_tokens is 1, expected an integer of at least 2"),
        ({"seed": -1}, "seed is -1"),
        ({"prompt_length": 2000}, "prompt_length is 2000 and new_tokens is 64, .* context of 2048 tokens"),
        ({"prompt_length": 1984, "determinism": "strict"}, "context of 2047 tokens"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_loading(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], sentence: str
):
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the bundle was loaded")

    monkeypatch.setattr(module, "load", refuse)
    with pytest.raises(UsageError, match=sentence):
        load_test(tiny_bundle, **arguments)


def test_the_whole_context_may_be_used(tiny_bundle: Path):
    report = load_test(tiny_bundle, concurrency=1, requests=1, prompt_length=2046, new_tokens=2, threads=1)
    assert report.completed == 1
