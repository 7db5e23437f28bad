"""An engine under requests that come whether or not it keeps pace: an open-loop benchmark.

Requests arrive as a Poisson process, and none waits for another's answer: a closed loop would slow down together with
the engine and never see a queue (Schroeder et al., Open Versus Closed: A Cautionary Tale, NSDI 2006). Latencies count
from the moment at which a request was due, so a late client hides nothing (Tene, How NOT to Measure Latency,
https://www.infoq.com/presentations/latency-response-time/).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmc.bundle import Limits, read_bundle
from llmc.errors import QueueFullError, UsageError
from llmc.runtime.api.options import Determinism, row_limit
from llmc.runtime.bench.client import Report, Visit, common, draw_prompt, due_times, visit
from llmc.runtime.model import load

PERCENTILES = (50, 95, 99)
MAX_REQUESTS = 1_000_000  # every token's time is kept
LOWEST = {"new_tokens": 2, "seed": 0}  # of the rest 1
MIN_RATE = 1e-6  # one request in twelve days


@dataclass(frozen=True)
class Percentiles:
    """Seconds, interpolated between measurements as numpy does."""

    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """The findings of a load test.

    Attributes:
        concurrency: rows that ran at once at most (an even number with determinism ``batch``); the rest queued.
        max_queue: requests that could wait; one more was rejected.
        rate: requests per second that were meant to arrive; None if all arrived at once.
        arrival_seed: what the gaps between arrivals, and the prompts, were drawn from.
        arrived_rate: requests per second that were due; None for one request or when all arrived at once.
        completed, rejected, failed: requests that were answered in full, met a full queue, ended with another error, of
            which ``failure`` is the first.
        duration_s: from the first arrival to the last answer.
        achieved_rate: completed requests per second of it.
        output_tokens_per_s, total_tokens_per_s: of completed requests, without and with their prompts.
        ttft: time to first token, from the moment at which the request was due.
        tpot: time per output token after the first, the mean of each request.
        itl: inter-token latency, every gap between two tokens; tokens that one step committed have gaps of 0.
        e2e: from the moment at which the request was due to its last token.
        queue: from that moment until the engine took the request up.
        draft_acceptance: accepted drafts by proposed ones; None where nothing was proposed.
    """

    concurrency: int
    max_queue: int
    rate: float | None
    arrival_seed: int
    requests: int
    determinism: str
    draft: str | None
    arrived_rate: float | None
    completed: int
    rejected: int
    failed: int
    failure: str | None
    duration_s: float
    achieved_rate: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    queue: Percentiles
    draft_acceptance: float | None


def load_test(
    bundle: str | Path,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    requests: int = 64,
    prompt_length: int = 128,
    new_tokens: int = 64,
    seed: int = 0,
    threads: int | None = None,
    **options: Any,
) -> LoadReport:
    """Load the bundle and let requests arrive, each with arbitrary tokens of its own, answered greedily.

    Args:
        bundle: the folder that ``llmc build`` wrote.
        concurrency: rows that run at once; default and upper bound: what the bundle was built for.
        rate: requests per second, from 1e-6; None lets all arrive at once.
        requests: how many arrive, from 1 to 1,000,000.
        prompt_length, new_tokens: of each request, from 1 and 2; the end-of-sequence token does not end it.
        seed: of the arrivals and the prompts.
        options: more fields of :class:`llmc.runtime.api.options.EngineOptions`.

    Raises:
        UsageError: an argument is out of range.
        BundleError, ResourceError: the bundle cannot be loaded.
        LlmcError: no request was answered; the first one's error.
    """
    folder = Path(bundle)
    limits = read_bundle(folder).limits
    # A strict engine keeps a position of its own.
    room = limits.max_context - (options.get("determinism") == Determinism.STRICT)
    rows = limits.max_batch if concurrency is None else concurrency
    given = {"requests": requests, "prompt_length": prompt_length, "new_tokens": new_tokens, "seed": seed}
    _check({"concurrency": rows, **given}, rate, limits, room)
    start = time.perf_counter()
    with load(folder, threads=threads, self_test=False, max_batch=rows, **options) as model:
        load_s = time.perf_counter() - start
        prompt = partial(draw_prompt, model.manifest.geometry.vocab_size, prompt_length, seed)
        # The first calls allocate; they are not counted. A queue shorter than the rows may turn some of them away.
        visit(model, lambda index: prompt(requests + index), [0.0] * rows, 2)
        offsets = [0.0] * requests if rate is None else list(islice(due_times(rate, seed), requests))
        visits = visit(model, prompt, offsets, new_tokens)
        engine = model.engine.options
        return LoadReport(
            concurrency=row_limit(model.manifest, engine),
            max_queue=engine.max_queue,
            rate=rate,
            arrival_seed=seed,
            requests=requests,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            determinism=engine.determinism.value,
            draft=None if engine.draft is None else str(engine.draft),
            load_s=load_s,
            **common(model),
            **figures(visits, prompt_length),
        )


def _check(given: dict[str, int], rate: float | None, limits: Limits, room: int) -> None:
    for name, value in given.items():
        low = LOWEST.get(name, 1)
        if not low <= value <= MAX_REQUESTS:
            raise UsageError(f"{name} is {value!r}, expected an integer from {low} to {MAX_REQUESTS:,}")
    if rate is not None and not MIN_RATE <= rate < float("inf"):
        raise UsageError(
            f"rate is {rate!r}, expected requests per second from {MIN_RATE:g}; leave it out, and all arrive at once"
        )
    if (rows := given["concurrency"]) > limits.max_batch:
        raise UsageError(
            f"concurrency is {rows}, the bundle was built for {limits.max_batch}; build with a larger --max-batch"
        )
    prompt_length, new_tokens = given["prompt_length"], given["new_tokens"]
    if prompt_length + new_tokens > room:
        raise UsageError(
            f"prompt_length is {prompt_length} and new_tokens is {new_tokens}, expected together at most the "
            f"bundle's context of {room} tokens"
        )


def figures(visits: Sequence[Visit], prompt_length: int) -> dict[str, Any]:
    """The fields of a report that follow from what the clients saw; the first error where nobody was answered."""
    done = [visit for visit in visits if visit.metrics is not None]
    metrics = [visit.metrics for visit in visits if visit.metrics is not None]
    errors = [visit.error for visit in visits if visit.error is not None]
    failures = [error for error in errors if not isinstance(error, QueueFullError)]
    if not done:
        raise errors[0]
    seconds = max(visit.tokens[-1] for visit in done) - visits[0].due
    span = visits[-1].due - visits[0].due
    gaps = [np.diff(visit.tokens) for visit in done]
    tokens = sum(len(visit.tokens) for visit in done)
    drafted = sum(own.drafted for own in metrics)
    return {
        "arrived_rate": (len(visits) - 1) / span if span > 0 else None,
        "completed": len(done),
        "rejected": len(errors) - len(failures),
        "failed": len(failures),
        "failure": str(failures[0]) if failures else None,
        "duration_s": seconds,
        "achieved_rate": len(done) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "total_tokens_per_s": (tokens + prompt_length * len(done)) / seconds,
        "ttft": _percentiles([visit.tokens[0] - visit.due for visit in done]),
        "tpot": _percentiles([float(gap.mean()) for gap in gaps]),
        "itl": _percentiles(np.concatenate(gaps).tolist()),
        "e2e": _percentiles([visit.tokens[-1] - visit.due for visit in done]),
        "queue": _percentiles(
            [visit.sent - visit.due + (own.queue_s or 0.0) for visit, own in zip(done, metrics, strict=True)]
        ),
        "draft_acceptance": sum(own.accepted for own in metrics) / drafted if drafted else None,
    }


def _percentiles(seconds: list[float]) -> Percentiles:
    return Percentiles(*(float(value) for value in np.percentile(seconds, PERCENTILES)))
