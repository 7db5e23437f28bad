"""The load test sends requests when they are due, waits for nobody, counts from there, and hides no failure."""

import dataclasses
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.bundle import read_bundle
from llmc.errors import DeadlineError, LlmcError, QueueFullError, UsageError
from llmc.runtime import load
from llmc.runtime.bench import client
from llmc.runtime.bench import load_test as module
from llmc.runtime.bench.client import Visit, due_times, send
from llmc.runtime.bench.load_test import Percentiles, figures, load_test
from llmc.runtime.engine.engine import Engine
from llmc.runtime.observe.metrics import RequestMetrics

REQUESTS = 6
PATIENCE = 120  # seconds after which a thread that waits counts as waiting for ever
METRICS = RequestMetrics(0.5, 0.0, None, None, None, None, None, 10, 0, 3, 0, 0, 0, "length")

GAPS = 10_000
# Kolmogorov-Smirnov: the largest distance of n draws to their distribution exceeds 1.95 / sqrt(n) once in a thousand.
DISTANCE = 1.95 / GAPS**0.5


def distance_to_exponential(gaps: np.ndarray, rate: float) -> float:
    """The largest distance between the gaps' distribution function and the exponential one."""
    ordered = np.sort(gaps)
    expected = 1 - np.exp(-rate * ordered)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


# --------------------------------------------------------------------------------------------------------- arrivals


def test_gaps_between_arrivals_are_exponential_with_the_rate_asked_for():
    offsets = list(islice(due_times(50.0, 0), GAPS + 1))
    assert offsets[0] == 0
    assert distance_to_exponential(np.diff(offsets), 50.0) < DISTANCE
    # Planted: even gaps, and a rate off by a tenth.
    assert distance_to_exponential(np.full(GAPS, 1 / 50), 50.0) > DISTANCE
    assert distance_to_exponential(np.diff(offsets), 55.0) > DISTANCE


def test_requests_are_sent_when_due_and_nobody_is_waited_for_or_stopped():
    """The first is turned away; the second takes long to submit, so the third is sent late, and at once."""
    sent: list[int] = []

    def submit(index: int, visit: Visit) -> Any:
        sent.append(index)
        if index == 0:
            raise QueueFullError("full")
        if index == 1:
            time.sleep(0.06)
        return SimpleNamespace()

    visits = send([0.0, 0.02, 0.04, 0.12], submit)
    assert sent == [0, 1, 2, 3]
    assert isinstance(visits[0].error, QueueFullError) and visits[1].handle is not None
    assert [visit.due - visits[0].due for visit in visits] == pytest.approx([0, 0.02, 0.04, 0.12])
    assert all(visit.sent >= visit.due for visit in visits)
    assert visits[2].sent - visits[2].due > 0.03


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


def test_throughput_is_of_what_was_completed_until_the_last_answer():
    errors = [QueueFullError("full"), DeadlineError("too late"), DeadlineError("again")]
    visits = [visit(10.0, 11.0, 12.0, drafted=3, accepted=1), *(refused(11.0, error) for error in errors)]
    found = figures([*visits, visit(14.0, 15.0, 15.0, drafted=5, accepted=5)], 8)
    assert (found["completed"], found["rejected"], found["failed"], found["failure"]) == (2, 1, 2, "too late")
    assert (found["duration_s"], found["arrived_rate"], found["achieved_rate"]) == (5.0, 1.0, 2 / 5)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (4 / 5, 20 / 5)
    assert (found["itl"].p50_s, found["draft_acceptance"]) == (0.5, 0.75)  # gaps of 1, and of 0 within a step


def test_without_any_answer_the_first_error_is_raised():
    with pytest.raises(DeadlineError, match="too late"):
        figures([refused(0.0, DeadlineError("too late")), refused(0.0, QueueFullError("full"))], 8)


# ---------------------------------------------------------------------------------------------------- the real thing


def test_the_report_says_what_was_run_and_every_request_is_answered_in_full(tiny_bundle: Path):
    report = load_test(
        tiny_bundle,
        rate=200.0,
        requests=REQUESTS,
        prompt_length=12,
        new_tokens=5,
        threads=1,
        seed=3,
        draft="lookup",
        determinism="strict",
    )
    limits = read_bundle(tiny_bundle).limits
    assert (report.bundle, report.concurrency, report.rate) == (str(tiny_bundle), limits.max_batch, 200.0)
    assert (report.requests, report.prompt_length, report.new_tokens, report.threads) == (REQUESTS, 12, 5, 1)
    assert (report.determinism, report.draft, report.engine) == ("strict", "lookup", "onnxruntime")
    assert (report.completed, report.rejected, report.failed, report.failure) == (REQUESTS, 0, 0, None)
    assert report.total_tokens_per_s == pytest.approx(REQUESTS * 17 / report.duration_s)
    assert report.queue.p50_s <= report.ttft.p50_s <= report.e2e.p50_s <= report.duration_s


def test_a_full_queue_rejects(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    models: list[Any] = []
    monkeypatch.setattr(module, "load", lambda *given, **more: models.append(load(*given, **more)) or models[0])
    monkeypatch.setattr(client, "send", lambda *given: while_held(models[0].engine, lambda: send(*given)))
    report = load_test(tiny_bundle, requests=40, prompt_length=4, new_tokens=2, threads=1, max_queue=3)
    assert (report.completed, report.rejected, report.max_queue) == (3, 37, 3)


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
        ({"rate": float("nan")}, "rate is nan"),
        ({"concurrency": 0}, "concurrency is 0, expected an integer from 1 to 1,000,000"),
        ({"concurrency": 4096}, "concurrency is 4096, the bundle was built for"),
        ({"requests": 10**12}, "requests is 1000000000000, expected"),
        ({"new_tokens": 1}, "new_tokens is 1, expected an integer from 2"),
        ({"prompt_length": 1984, "determinism": "strict"}, "context of 2047 tokens"),
    ],
)
def test_an_argument_out_of_range_is_refused(tiny_bundle: Path, arguments: dict[str, Any], sentence: str):
    with pytest.raises(UsageError, match=sentence):
        load_test(tiny_bundle, **arguments)
