"""Figures of a load test over HTTP: what they are computed from, and nothing else, is the clients' moments."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.errors import UsageError
from llmc.runtime.bench.exchange import Exchange

SCHEMA = 1  # of the report as JSON
QUANTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft", "tpot", "e2e")
# The client counts as behind when one request in a hundred was sent so late, or when its loop had so little rest that
# the moments it notes are late themselves.
BEHIND_S = 0.01
BUSY = 0.8


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Percentiles, interpolated as numpy does, with the mean, the largest, and how many values there were."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class ErrorCount:
    """Requests that failed in one way, and what the first of them said."""

    count: int
    first: str


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Requests that met every objective, of all that were sent; ``met`` is the share that met each."""

    slo: Mapping[str, float]
    share: float
    requests_per_s: float
    met: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The findings at one rate or one concurrency; times in seconds, None where nothing was completed.

    Attributes:
        rate: requests per second that were meant to arrive; None in a closed loop.
        concurrency: clients of a closed loop, each of which sends when it has its answer; None for a rate.
        requests, completed, failed: how many were sent, were answered in full, were not.
        errors: by kind.
        duration_s: from the first request to the end of the last answer.
        arrived_rate: requests per second that were due; None for less than two, and in a closed loop.
        most_in_flight: requests that were under way at once.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: of completed requests; the last with their prompts,
            None if the server did not count these.
        counted_by: ``usage`` if the server counted every output's tokens, ``chunks`` if none, else ``both``.
        prompt_tokens, output_tokens: of a request.
        ttft: time to first token, from sending.
        tpot: time per output token after the first: (e2e - ttft) / (tokens - 1).
        itl: inter-token latency: every gap between two pieces of an answer.
        e2e: from sending to the last piece of output.
        ttft_from_due, e2e_from_due: the same from the moment at which a request was due, as users feel it who do not
            wait for a client that is late.
        client_delay: by how much the client was late.
        client_cpu: share of one CPU that the client took.
        behind: the client could not keep pace, so the figures are in part its own.
        goodput: None without objectives.
    """

    rate: float | None
    concurrency: int | None
    requests: int
    completed: int
    failed: int
    errors: Mapping[str, ErrorCount]
    duration_s: float
    arrived_rate: float | None
    most_in_flight: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    counted_by: str
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    ttft_from_due: Distribution | None
    e2e_from_due: Distribution | None
    client_delay: Distribution | None
    client_cpu: float
    behind: bool
    goodput: Goodput | None


@dataclass(frozen=True, kw_only=True)
class ServeReport:
    """A load test: its arguments, the server, the client's machine, and a point for each rate or concurrency."""

    schema: int
    date: str
    server: str
    model: str
    arguments: Mapping[str, Any]
    client: Mapping[str, str]
    points: Sequence[Point]


def read_slo(text: str) -> dict[str, float]:
    """Read objectives such as ``ttft=0.5,tpot=0.05``, in seconds.

    Raises:
        UsageError: it is none, or names something else than :data:`OBJECTIVES`.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if name not in OBJECTIVES or not 0 < found[name] < float("inf"):
            raise UsageError(f"slo is {text!r}, expected seconds of {', '.join(OBJECTIVES)}, as ttft=0.5,tpot=0.05")
    return found


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    quantiles = {f"p{q}": float(value) for q, value in zip(QUANTILES, np.percentile(known, QUANTILES), strict=True)}
    return Distribution(count=len(known), mean=float(np.mean(known)), max=float(max(known)), **quantiles)


def point(
    exchanges: Sequence[Exchange],
    *,
    rate: float | None,
    concurrency: int | None,
    client_cpu: float,
    slo: Mapping[str, float],
) -> Point:
    """Compute the figures of one point from at least one exchange."""
    done = [each for each in exchanges if each.failure is None]
    start, end = min(each.due for each in exchanges), max(each.ended for each in exchanges)
    seconds, span = end - start, max(each.due for each in exchanges) - start
    tokens, prompts = sum(each.tokens for each in done), [each.prompt_tokens for each in done]
    late = distribution(each.late for each in exchanges)
    return Point(
        rate=rate,
        concurrency=concurrency,
        requests=len(exchanges),
        completed=len(done),
        failed=len(exchanges) - len(done),
        errors=count_errors(exchanges),
        duration_s=seconds,
        arrived_rate=(len(exchanges) - 1) / span if rate is not None and span > 0 else None,
        most_in_flight=most_in_flight(exchanges),
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=tokens / seconds,
        total_tokens_per_s=None if None in prompts else (tokens + sum(filter(None, prompts))) / seconds,
        counted_by=counted_by(done),
        prompt_tokens=distribution(prompts),
        output_tokens=distribution(each.tokens for each in done),
        ttft=distribution(each.ttft for each in done),
        tpot=distribution(each.tpot for each in done),
        itl=distribution(gap for each in done for gap in np.diff(each.chunks).tolist()),
        e2e=distribution(each.e2e for each in done),
        ttft_from_due=distribution(each.ttft + each.late for each in done),
        e2e_from_due=distribution(each.e2e + each.late for each in done),
        client_delay=late,
        client_cpu=client_cpu,
        behind=client_cpu > BUSY or (late is not None and late.p99 > BEHIND_S),
        goodput=goodput(exchanges, slo, seconds) if slo else None,
    )


def count_errors(exchanges: Sequence[Exchange]) -> dict[str, ErrorCount]:
    """Failures by kind, the most frequent first."""
    found: dict[str, list[str]] = {}
    for each in exchanges:
        if each.failure is not None:
            found.setdefault(each.failure.kind, []).append(each.failure.message)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return {kind: ErrorCount(count=len(messages), first=messages[0]) for kind, messages in ordered}


def counted_by(done: Sequence[Exchange]) -> str:
    """The origin of the numbers of tokens."""
    by_usage = sum(each.completion_tokens is not None for each in done)
    return "chunks" if not by_usage else "usage" if by_usage == len(done) else "both"


def most_in_flight(exchanges: Sequence[Exchange]) -> int:
    """The largest number of requests between sending and end; an end goes before a beginning at the same moment."""
    steps = sorted([(each.ended, -1) for each in exchanges] + [(each.sent, 1) for each in exchanges])
    return int(np.cumsum([step for _, step in steps]).max())


def goodput(exchanges: Sequence[Exchange], slo: Mapping[str, float], seconds: float) -> Goodput:
    """Judge all requests; one that failed meets nothing, and one of a single token meets any TPOT.

    TTFT and E2E count from when a request was due, so a client that is late makes no server look good.
    """
    met = [{name: _meets(each, name, limit) for name, limit in slo.items()} for each in exchanges]
    good = sum(all(own.values()) for own in met)
    shares = {name: sum(own[name] for own in met) / len(met) for name in slo}
    return Goodput(slo=slo, share=good / len(met), requests_per_s=good / seconds, met=shares)


def _meets(exchange: Exchange, name: str, limit: float) -> bool:
    if exchange.failure is not None:
        return False
    if name == "tpot":
        return exchange.tpot is None or exchange.tpot <= limit
    return float(getattr(exchange, name)) + exchange.late <= limit
