"""Measurements of serving: the timeline of a request, and counters and histograms of an engine.

One thread writes, usually the engine's, and any thread may read meanwhile. Times are seconds of ``time.monotonic``.
Names of what is measured follow vLLM (https://docs.vllm.ai/en/latest/design/metrics.html); the buckets do not, for they
begin at 10 ms, where a small model on an edge device has long ended its step.
"""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc.runtime.observe.histogram import Histogram, HistogramSnapshot

# Upper bounds in seconds: six per decade from 0.1 ms to 1,000 s, so that a quantile is known within a third or better.
_DIGITS = ("1", "1.5", "2", "3", "5", "7")
SECONDS_BUCKETS = (*(float(f"{digit}e{exponent}") for exponent in range(-4, 3) for digit in _DIGITS), 1000.0)
# Upper bounds in rows of a call: every size that small batches have, then powers of two.
BATCH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
# Phases of calls, and outcomes, that are always listed, with 0 where none had it; another one once it happened.
PHASES = ("prefill", "decode")
OUTCOMES = ("stop", "length", "cancelled", "deadline", "refused", "error")


@dataclass(frozen=True)
class RequestMetrics:
    """Figures of one request; a time is None as long as what it measures has not happened.

    Attributes:
        queue_s: from submission to admission.
        ttft_s: time to first token, from submission.
        tpot_s: time per output token, the mean gap between the tokens of an output; None below two tokens.
        itl_p50_s: median inter-token latency. Tokens that one step commits share its time: the gaps between them are 0.
        itl_p95_s: its 95th percentile.
        itl_max_s: its maximum.
        e2e_s: from submission to the end.
        prompt_tokens: length of the prompt.
        cached_tokens: of these, taken from the prefix cache.
        output_tokens: tokens generated.
        drafted: tokens proposed by speculation.
        accepted: of these, those that the model agreed with.
        overflows: how often its context was cut, as its overflow policy allows.
        finish_reason: why it ended, None while it runs.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    e2e_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    overflows: int
    finish_reason: str | None

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts by proposed ones, 0 to 1; None where nothing was proposed."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class Gauges:
    """Levels at one moment.

    Attributes:
        waiting: requests in the queue.
        running: requests that hold a place in the batch.
        kv_reserved_bytes: memory that the KV cache has taken.
        kv_used_bytes: of it, what valid positions fill.
        prefix_cache_bytes: memory that the prefix cache holds.
    """

    waiting: int = 0
    running: int = 0
    kv_reserved_bytes: int = 0
    kv_used_bytes: int = 0
    prefix_cache_bytes: int = 0


@dataclass(frozen=True)
class EngineSnapshot:
    """Everything that an engine counted since it was made, at one moment; counters never fall.

    Attributes:
        uptime_s: seconds since the counting began.
        requests: requests that ended, by outcome; all of OUTCOMES are there.
        prompt_tokens: of all admitted requests.
        output_tokens: generated so far.
        prefix_hit_tokens: prompt tokens taken from the prefix cache.
        prefix_miss_tokens: prompt tokens that had to be computed.
        draft_proposed: tokens proposed by speculation.
        draft_accepted: of these, those that the model agreed with.
        overflows: contexts that were cut, as their requests' policy allows.
        energy_joules: None where the machine exposes no energy.
        ttft: time to first token, seconds.
        tpot: mean time per output token of each finished request, seconds.
        itl: inter-token latency, seconds.
        e2e: from submission to the end of each request, seconds.
        queue: from submission to admission, seconds.
        step: duration of the calls of the session by phase, seconds.
        batch_size: rows of each call.
        gauges: as the engine set them last.
    """

    uptime_s: float
    requests: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    draft_proposed: int
    draft_accepted: int
    overflows: int
    energy_joules: float | None
    ttft: HistogramSnapshot
    tpot: HistogramSnapshot
    itl: HistogramSnapshot
    e2e: HistogramSnapshot
    queue: HistogramSnapshot
    step: dict[str, HistogramSnapshot]
    batch_size: HistogramSnapshot
    gauges: Gauges

    @property
    def prefix_hit_rate(self) -> float | None:
        """Prompt tokens from the prefix cache by all that were looked up, 0 to 1; None before the first."""
        return _share(self.prefix_hit_tokens, self.prefix_hit_tokens + self.prefix_miss_tokens)

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted drafts by proposed ones, 0 to 1; None where nothing was proposed."""
        return _share(self.draft_accepted, self.draft_proposed)

    @property
    def joules_per_token(self) -> float | None:
        """Energy by generated token; None where no energy is exposed or no token was generated."""
        return None if self.energy_joules is None else _share(self.energy_joules, self.output_tokens)

    def summary(self) -> dict[str, float | int | None]:
        """The figures that people ask for, flat and ready for JSON; quantiles are estimates from the buckets."""
        values: dict[str, float | int | None] = {
            "requests": sum(self.requests.values()),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "prefix_hit_rate": self.prefix_hit_rate,
            "draft_acceptance": self.draft_acceptance,
            "joules_per_token": self.joules_per_token,
        }
        for name in ("ttft", "tpot", "itl", "e2e", "queue"):
            histogram: HistogramSnapshot = getattr(self, name)
            values |= {f"{name}_p{percent}_s": histogram.quantile(percent / 100) for percent in (50, 95, 99)}
        return values


@dataclass
class _Counters:
    """The numbers that only grow; EngineMetrics holds the lock."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    overflows: int = 0
    energy_joules: float | None = None
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))


class EngineMetrics:
    """Counters, histograms and gauges of one engine.

    Requests are recorded through the timelines that :meth:`timeline` gives out; what belongs to no request is recorded
    here. Every method may be called from any thread, and takes well under two microseconds.

    Args:
        clock: seconds that never go back; the default is ``time.monotonic``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.gauges = Gauges()  # replaced whole, so a reader never sees half of it
        self._began = clock()
        self._lock = threading.Lock()
        self._counters = _Counters()
        self._ttft = Histogram(SECONDS_BUCKETS)
        self._tpot = Histogram(SECONDS_BUCKETS)
        self._itl = Histogram(SECONDS_BUCKETS)
        self._e2e = Histogram(SECONDS_BUCKETS)
        self._queue = Histogram(SECONDS_BUCKETS)
        self._batch_size = Histogram(BATCH_BUCKETS)
        self._step = {phase: Histogram(SECONDS_BUCKETS) for phase in PHASES}

    def timeline(self, prompt_tokens: int) -> "RequestTimeline":
        """A request enters the queue now; whatever its timeline records is counted here too."""
        return RequestTimeline(prompt_tokens, self)

    def refuse(self) -> None:
        """A request was turned away before it could wait: the queue is full, or it can never fit."""
        with self._lock:
            self._counters.requests["refused"] += 1

    def step(self, phase: str, seconds: float, rows: int) -> None:
        """A call of the session ended: its phase (of PHASES, or another name), duration and rows."""
        with self._lock:
            histogram = self._step.get(phase)
            if histogram is None:
                histogram = self._step[phase] = Histogram(SECONDS_BUCKETS)
            histogram.observe(seconds)
            self._batch_size.observe(rows)

    def add_energy(self, joules: float) -> None:
        """Energy was used; without a single call the total stays None, which is not 0."""
        with self._lock:
            self._counters.energy_joules = (self._counters.energy_joules or 0.0) + joules

    def snapshot(self) -> EngineSnapshot:
        """All numbers of one moment: no event is counted in one and missing in another."""
        with self._lock:
            counters = {**vars(self._counters), "requests": dict(self._counters.requests)}
            return EngineSnapshot(
                **counters,
                uptime_s=self.clock() - self._began,
                ttft=self._ttft.snapshot(),
                tpot=self._tpot.snapshot(),
                itl=self._itl.snapshot(),
                e2e=self._e2e.snapshot(),
                queue=self._queue.snapshot(),
                step={phase: histogram.snapshot() for phase, histogram in self._step.items()},
                batch_size=self._batch_size.snapshot(),
                gauges=self.gauges,
            )

    # What follows is called by timelines.

    def _admitted(self, queue_s: float, prompt_tokens: int, hits: int) -> None:
        with self._lock:
            self._counters.prompt_tokens += prompt_tokens
            self._counters.prefix_hit_tokens += hits
            self._counters.prefix_miss_tokens += prompt_tokens - hits
            self._queue.observe(queue_s)

    def _tokens(self, count: int, ttft_s: float | None, gap_s: float | None) -> None:
        with self._lock:
            self._counters.output_tokens += count
            if ttft_s is not None:
                self._ttft.observe(ttft_s)
            if gap_s is not None:
                self._itl.observe(gap_s)
            if count > 1:
                self._itl.observe(0.0, count - 1)

    def _drafted(self, proposed: int, accepted: int) -> None:
        with self._lock:
            self._counters.draft_proposed += proposed
            self._counters.draft_accepted += accepted

    def _overflowed(self) -> None:
        with self._lock:
            self._counters.overflows += 1

    def _finished(self, outcome: str, e2e_s: float, tpot_s: float | None) -> None:
        with self._lock:
            requests = self._counters.requests
            requests[outcome] = requests.get(outcome, 0) + 1
            self._e2e.observe(e2e_s)
            if tpot_s is not None:
                self._tpot.observe(tpot_s)


class RequestTimeline:
    """The moments of one request's events; made when it enters the queue. One thread writes, any may read.

    Every ``now`` is the moment of the event on the timeline's clock, the present by default.

    Args:
        prompt_tokens: length of the prompt.
        engine: counts the same events, and has the clock.
    """

    def __init__(self, prompt_tokens: int, engine: EngineMetrics) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._times = array("d")
        self._gaps = array("d")
        self._latest: dict[int, float] = {}  # output -> time of its latest token
        self.queued = self._clock()
        self.queued_unix_ns = time.time_ns()  # where the timeline lies on the calendar, for spans
        self.admitted: float | None = None
        self.ended: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.overflows = 0

    @property
    def first_token(self) -> float | None:
        """Moment when the first token was committed; None before."""
        return self._times[0] if self._times else None

    def token_times(self) -> list[float]:
        """Moments when the tokens so far were committed."""
        return self._times.tolist()

    def admit(self, cached_tokens: int = 0, now: float | None = None) -> None:
        """The request gets a place; ``cached_tokens`` of its prompt came from the prefix cache."""
        self.admitted = self._clock() if now is None else now
        self.cached_tokens = cached_tokens
        self._engine._admitted(self.admitted - self.queued, self.prompt_tokens, cached_tokens)

    def token(self, count: int = 1, now: float | None = None, output: int = 0) -> None:
        """A step committed ``count`` tokens, at least 1, to one of the request's outputs.

        Outputs grow side by side, so gaps are measured within each; the first token of a further one ends no gap.
        """
        at = self._clock() if now is None else now
        since, self._latest[output] = self._latest.get(output), at
        ttft_s = None if self._times else at - self.queued
        gap_s = None if since is None else at - since
        if gap_s is not None:
            self._gaps.append(gap_s)
        self._times.append(at)
        for _ in range(count - 1):
            self._times.append(at)
            self._gaps.append(0.0)
        self._engine._tokens(count, ttft_s, gap_s)

    def draft(self, proposed: int, accepted: int) -> None:
        """Speculation proposed tokens, and the model agreed with ``accepted`` of them."""
        self.drafted += proposed
        self.accepted += accepted
        self._engine._drafted(proposed, accepted)

    def overflow(self) -> None:
        """The context was cut, as the request's policy allows."""
        self.overflows += 1
        self._engine._overflowed()

    def finish(self, reason: str, now: float | None = None) -> None:
        """The request ended for ``reason``, one of OUTCOMES or a word of its own; only the first call counts."""
        if self.ended is not None:
            return
        self.ended = self._clock() if now is None else now
        self.finish_reason = reason
        self._engine._finished(reason, self.ended - self.queued, _mean(self._gaps.tolist()))

    def metrics(self) -> RequestMetrics:
        """The request's figures so far."""
        gaps = self._gaps.tolist()  # a copy in one step of the interpreter: numpy would lock the array while it reads
        p50, p95, most = (float(value) for value in np.percentile(gaps, (50, 95, 100))) if gaps else [None] * 3
        return RequestMetrics(
            queue_s=None if self.admitted is None else self.admitted - self.queued,
            ttft_s=None if self.first_token is None else self.first_token - self.queued,
            tpot_s=_mean(gaps),
            itl_p50_s=p50,
            itl_p95_s=p95,
            itl_max_s=most,
            e2e_s=None if self.ended is None else self.ended - self.queued,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=len(self._times),
            drafted=self.drafted,
            accepted=self.accepted,
            overflows=self.overflows,
            finish_reason=self.finish_reason,
        )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
