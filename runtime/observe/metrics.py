"""Metrics of serving: the timeline of a request, and counters and histograms of an engine.

One thread writes, usually the engine's; any thread may read. Times are seconds of ``time.monotonic``. Metric names
follow vLLM (https://docs.vllm.ai/en/latest/design/metrics.html); its buckets begin at 10 ms, too late for a small model
on an edge device, so the buckets differ.
"""

import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

# Upper bounds in seconds: six per decade from 0.1 ms to 1,000 s, so that a quantile is accurate to a third or better.
_DIGITS = ("1", "1.5", "2", "3", "5", "7")
SECONDS_BUCKETS = (*(float(f"{digit}e{exponent}") for exponent in range(-4, 3) for digit in _DIGITS), 1000.0)
# Upper bounds in rows per call: every size of small batches, then powers of two.
BATCH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
# Phases of calls, and outcomes, that are always listed, even with 0; others are listed once they occur.
PHASES = ("prefill", "decode")
OUTCOMES = ("stop", "length", "cancelled", "deadline", "refused", "error")

# Histograms of seconds, by the snapshot's field names.
_SECONDS = ("ttft", "tpot", "itl", "e2e", "queue")


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of one request; None if the event has not happened."""

    # from submission to admission, to the first token, to the end
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None  # time per output token, the mean time between an output's tokens; None below two tokens
    # inter-token latency; 0 between tokens that one step commits
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    e2e_s: float | None
    prompt_tokens: int
    cached_tokens: int  # prompt tokens taken from the prefix cache
    output_tokens: int
    # tokens proposed by speculation, and those that the model accepted
    drafted: int
    accepted: int
    overflows: int  # how often the context was cut, as the request's overflow policy allows
    finish_reason: str | None
    calls: int = 0  # calls of the model for an answer that is not made token by token; 0 for others


@dataclass
class Histogram:
    """Counts of observations by bucket, with their sum. Not thread-safe: its owner hands out copies."""

    bounds: tuple[float, ...]  # inclusive upper bounds of the buckets, strictly ascending; one more bucket is unbounded
    counts: list[int] = field(default_factory=list)  # observations per bucket, `len(bounds) + 1` values, not cumulative
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = list(self.counts) or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count ``value``, at least 0."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        return replace(self)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Observations at or below each bound; the last value counts all."""
        return tuple(accumulate(self.counts))


class Metric(NamedTuple):
    """A field's metric: its Prometheus name after ``llmc_``, its meaning, and the label of its parts."""

    name: str
    meaning: str
    label: str = ""


@dataclass(frozen=True)
class Gauges:
    """Levels at one moment."""

    waiting: Annotated[int, Metric("num_requests_waiting", "Requests in the queue.")] = 0
    running: Annotated[int, Metric("num_requests_running", "Requests that hold a place in the batch.")] = 0
    kv_reserved_bytes: Annotated[int, Metric("kv_cache_reserved_bytes", "Memory taken by the KV cache.")] = 0
    kv_used_bytes: Annotated[
        int, Metric("kv_cache_used_bytes", "Memory of the KV cache that valid positions fill.")
    ] = 0
    prefix_cache_bytes: Annotated[int, Metric("prefix_cache_bytes", "Memory held by the prefix cache.")] = 0


@dataclass(frozen=True)
class EngineSnapshot:
    """Everything that an engine has counted; ``requests`` has all OUTCOMES."""

    uptime_s: float
    gauges: Gauges
    requests: Annotated[dict[str, int], Metric("requests", "Requests that ended, by outcome.", "outcome")]
    prompt_tokens: Annotated[int, Metric("prompt_tokens", "Prompt tokens of admitted requests.")]
    output_tokens: Annotated[int, Metric("generation_tokens", "Tokens generated.")]
    prefix_hit_tokens: Annotated[int, Metric("prefix_cache_hit_tokens", "Prompt tokens taken from the prefix cache.")]
    prefix_miss_tokens: Annotated[int, Metric("prefix_cache_miss_tokens", "Prompt tokens that had to be computed.")]
    draft_proposed: Annotated[int, Metric("spec_decode_draft_tokens", "Tokens proposed by speculation.")]
    draft_accepted: Annotated[int, Metric("spec_decode_accepted_tokens", "Proposed tokens that the model agreed with.")]
    overflows: Annotated[int, Metric("context_overflows", "Contexts that were cut, as their requests' policy allows.")]
    ttft: Annotated[Histogram, Metric("time_to_first_token_seconds", "Time from submission to the first token.")]
    tpot: Annotated[
        Histogram,
        Metric("request_time_per_output_token_seconds", "Mean time between the tokens of a finished request."),
    ]
    itl: Annotated[
        Histogram, Metric("inter_token_latency_seconds", "Time between two tokens of a request; 0 within one step.")
    ]
    e2e: Annotated[Histogram, Metric("e2e_request_latency_seconds", "Time from submission to the end of a request.")]
    queue: Annotated[Histogram, Metric("request_queue_time_seconds", "Time from submission to admission.")]
    batch_size: Annotated[Histogram, Metric("step_batch_size", "Rows of a call of the session.")]
    step: Annotated[
        dict[str, Histogram], Metric("step_duration_seconds", "Duration of a call of the session, by phase.", "phase")
    ]


_COUNTERS = [name for name, kind in get_type_hints(EngineSnapshot).items() if kind is int]


class EngineMetrics:
    """Counters, histograms and gauges of one engine.

    Any thread may call any method. The engine sets ``read_gauges``, which reads the current levels on the calling
    thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.read_gauges: Callable[[], Gauges] = Gauges
        self._began = clock()
        self._lock = threading.Lock()
        self._counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._requests = dict.fromkeys(OUTCOMES, 0)
        self._histograms = {name: Histogram(SECONDS_BUCKETS) for name in _SECONDS}
        self._batch_size = Histogram(BATCH_BUCKETS)
        self._step = {phase: Histogram(SECONDS_BUCKETS) for phase in PHASES}

    def timeline(self, prompt_tokens: int) -> "RequestTimeline":
        """A request enters the queue now; the engine also counts what its timeline records."""
        return RequestTimeline(prompt_tokens, self)

    def step(self, phase: str, seconds: float, rows: int) -> None:
        """A session call ended: its phase (of :data:`PHASES`), duration and rows."""
        with self._lock:
            self._step[phase].observe(seconds)
            self._batch_size.observe(rows)

    def count(self, added: Mapping[str, int], outcome: str = "", **seconds: Iterable[float]) -> None:
        """Count an event of a request in one step: ``added`` to counters, its outcome, ``seconds`` by histogram."""
        with self._lock:
            for name, number in added.items():
                self._counters[name] += number
            for name, values in seconds.items():
                for value in values:
                    self._histograms[name].observe(value)
            if outcome:
                self._requests[outcome] = self._requests.get(outcome, 0) + 1

    def snapshot(self) -> EngineSnapshot:
        """All metrics at one moment: every event is in all of them or in none."""
        gauges = self.read_gauges()
        with self._lock:
            histograms = {name: histogram.copy() for name, histogram in self._histograms.items()}
            counted: dict[str, Any] = {**self._counters, **histograms}
            return EngineSnapshot(
                uptime_s=self.clock() - self._began,
                gauges=gauges,
                requests=dict(self._requests),
                batch_size=self._batch_size.copy(),
                step={phase: histogram.copy() for phase, histogram in self._step.items()},
                **counted,
            )


class RequestTimeline:
    """The times of one request's events, which its engine counts, too; one thread writes, any may read."""

    def __init__(self, prompt_tokens: int, engine: EngineMetrics) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._gaps = array("d")
        self._latest: dict[int, float] = {}  # output -> time of its latest token
        self.queued = self._clock()
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.output_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.overflows = 0
        self.calls = 0

    def admit(self, cached_tokens: int = 0) -> None:
        """The request is admitted; ``cached_tokens`` of its prompt came from the prefix cache."""
        self.admitted = self._clock()
        self.cached_tokens = cached_tokens
        self._engine.count(
            {
                "prompt_tokens": self.prompt_tokens,
                "prefix_hit_tokens": cached_tokens,
                "prefix_miss_tokens": self.prompt_tokens - cached_tokens,
            },
            queue=(self.admitted - self.queued,),
        )

    def token(self, count: int = 1, output: int = 0) -> None:
        """A step committed ``count`` tokens, at least 1, to one of the request's outputs.

        Outputs grow in parallel, so times are measured within each; the first token of a further output ends no gap.
        """
        at = self._clock()
        since, self._latest[output] = self._latest.get(output), at
        gaps = [0.0] * (count - 1) if since is None else [at - since] + [0.0] * (count - 1)
        first: tuple[float, ...] = ()
        if self.first_token is None:
            self.first_token, first = at, (at - self.queued,)
        self.output_tokens += count
        self._gaps.extend(gaps)
        self._engine.count({"output_tokens": count}, ttft=first, itl=gaps)

    def draft(self, proposed: int, accepted: int) -> None:
        """Speculation proposed tokens, and the model accepted ``accepted`` of them."""
        self.drafted += proposed
        self.accepted += accepted
        self._engine.count({"draft_proposed": proposed, "draft_accepted": accepted})

    def overflow(self) -> None:
        """The context was cut, as the request's policy allows."""
        self.overflows += 1
        self._engine.count({"overflows": 1})

    def finish(self, reason: str) -> None:
        """The request ended for ``reason``, one of OUTCOMES or another word; only the first call counts."""
        if self.ended is not None:
            return
        self.ended = self._clock()
        self.finish_reason = reason
        tpot = _mean(self._gaps)
        self._engine.count({}, reason, e2e=(self.ended - self.queued,), tpot=() if tpot is None else (tpot,))

    def metrics(self) -> RequestMetrics:
        gaps = self._gaps.tolist()  # an atomic copy: numpy would lock the array while it reads
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
            output_tokens=self.output_tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            overflows=self.overflows,
            finish_reason=self.finish_reason,
            calls=self.calls,
        )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
