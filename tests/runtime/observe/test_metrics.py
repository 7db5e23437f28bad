"""What a request and an engine cost: timelines, counters, and reading them while another thread writes."""

import threading

import numpy as np
import pytest

from llmc.runtime.observe.metrics import OUTCOMES, EngineMetrics, EngineSnapshot, Histogram, RequestTimeline

EXACT = 1e-12  # differences of a few doubles near 100


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> EngineMetrics:
    return EngineMetrics(clock)


def served(engine: EngineMetrics, clock: Clock, gaps: list[float], reason: str = "stop") -> RequestTimeline:
    """A request of 10 prompt tokens, 4 of them cached: 1 s in the queue, 2 s of prefill, then a token per gap."""
    timeline = engine.timeline(10)
    clock.after(1)
    timeline.admit(cached_tokens=4)
    clock.after(2)
    timeline.token()
    for gap in gaps:
        clock.after(gap)
        timeline.token()
    clock.after(0.5)
    timeline.finish(reason)
    return timeline


def test_a_request_is_measured_from_its_submission(engine, clock):
    gaps = [0.1, 0.2, 0.3, 0.4, 5.0]
    metrics = served(engine, clock, gaps).metrics()
    assert metrics.queue_s == pytest.approx(1.0, abs=EXACT)
    assert metrics.ttft_s == pytest.approx(3.0, abs=EXACT)
    assert metrics.tpot_s == pytest.approx(6.0 / 5, abs=EXACT)
    assert metrics.itl_p50_s == pytest.approx(np.percentile(gaps, 50), abs=EXACT)
    assert metrics.itl_p95_s == pytest.approx(np.percentile(gaps, 95), abs=EXACT)
    assert metrics.itl_max_s == pytest.approx(5.0, abs=EXACT)
    assert metrics.e2e_s == pytest.approx(9.5, abs=EXACT)
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens) == (10, 4, 6)
    assert metrics.finish_reason == "stop"


def test_tokens_of_one_step_share_its_time(engine, clock):
    timeline = engine.timeline(1)
    timeline.token()
    clock.after(0.3)
    timeline.token(count=3)
    metrics = timeline.metrics()
    assert metrics.output_tokens == 4
    assert metrics.itl_p50_s == 0.0
    assert metrics.itl_max_s == pytest.approx(0.3, abs=EXACT)
    assert metrics.tpot_s == pytest.approx(0.1, abs=EXACT)
    itl = engine.snapshot().itl
    assert (itl.count, itl.counts[0]) == (3, 2)


def test_gaps_are_measured_within_each_output(engine, clock):
    timeline = engine.timeline(1)
    clock.after(1)
    for _ in range(4):
        for output in range(3):
            timeline.token(output=output)
        clock.after(0.2)
    timeline.finish("stop")
    metrics, snapshot = timeline.metrics(), engine.snapshot()
    assert (metrics.output_tokens, snapshot.output_tokens) == (12, 12)
    assert (metrics.itl_p50_s, metrics.tpot_s) == (pytest.approx(0.2, abs=EXACT), pytest.approx(0.2, abs=EXACT))
    assert (snapshot.ttft.count, snapshot.itl.count) == (1, 9)
    assert snapshot.itl.sum == pytest.approx(9 * 0.2, abs=10 * EXACT)


def test_an_engine_counts_what_its_requests_do(engine, clock):
    timelines = [served(engine, clock, [0.1] * n, reason) for n, reason in ((3, "stop"), (1, "length"), (0, "stop"))]
    timelines[0].draft(8, 6)
    timelines[1].draft(2, 0)
    timelines[1].overflow()
    engine.count({}, "refused")
    snapshot = engine.snapshot()
    assert snapshot.requests == {**dict.fromkeys(OUTCOMES, 0), "stop": 2, "length": 1, "refused": 1}
    assert (snapshot.prompt_tokens, snapshot.output_tokens) == (30, 7)
    assert (snapshot.prefix_hit_tokens, snapshot.prefix_miss_tokens) == (12, 18)
    assert (snapshot.draft_proposed, snapshot.draft_accepted) == (10, 6)
    assert snapshot.overflows == 1
    counts = [getattr(snapshot, name).count for name in ("queue", "ttft", "itl", "tpot", "e2e")]
    assert counts == [3, 3, 4, 2, 3]
    assert snapshot.ttft.sum == pytest.approx(3 * 3.0)
    assert snapshot.queue.sum == pytest.approx(3 * 1.0)
    assert snapshot.tpot.sum == pytest.approx(2 * 0.1)
    assert snapshot.e2e.sum == pytest.approx(3 * 3.5 + 0.4)
    assert snapshot.uptime_s == pytest.approx(3 * 3.5 + 0.4)


def test_a_bound_belongs_to_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.0000001, 2.0, 2.1):
        histogram.observe(value)
    assert (histogram.counts, histogram.cumulative) == ([1, 2, 1], (1, 3, 4))


def contradictions(snapshot: EngineSnapshot) -> list[str]:
    """Of what must hold in every snapshot, what does not."""
    rules = {
        "every token is a first or a later one": snapshot.ttft.count + snapshot.itl.count == snapshot.output_tokens,
        "accepted drafts were proposed": snapshot.draft_accepted * 2 == snapshot.draft_proposed,
        "every admitted request has a prompt": snapshot.queue.count * 10 == snapshot.prompt_tokens,
        "every end is an outcome": snapshot.e2e.count == sum(snapshot.requests.values()),
    }
    return [rule for rule, holds in rules.items() if not holds]


def write(engine: EngineMetrics, requests: int) -> None:
    for _ in range(requests):
        timeline = engine.timeline(10)
        timeline.admit(cached_tokens=3)
        for _ in range(20):
            timeline.token(count=2)
            timeline.draft(2, 1)
            engine.step("decode", 0.001, 4)
        timeline.metrics()
        timeline.finish("stop")


def test_no_event_is_lost_or_half_seen_with_many_writers_and_a_reader():
    engine = EngineMetrics()
    writers = [threading.Thread(target=write, args=(engine, 60)) for _ in range(4)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen += contradictions(engine.snapshot())
    assert seen == []
    snapshot = engine.snapshot()
    assert (snapshot.output_tokens, snapshot.draft_proposed, snapshot.requests["stop"]) == (9600, 9600, 240)
    assert snapshot.step["decode"].count == 4800
