"""Figures of a load test over HTTP, all computed from the moments that its clients noted."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OUTPUTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # fields of a delta that are output
LONGEST_MESSAGE = 300  # characters of a server's words
QUANTILES = (50, 90, 95, 99)
# The client counts as behind when it sent one request in a hundred so late, or was so busy that its clock is late too.
BEHIND_S, BUSY = 0.01, 0.8


@dataclass(eq=False)
class Exchange:
    """A request as its client sees it; moments are those of ``time.perf_counter``.

    Attributes:
        due: when it was to be sent; in a closed loop, when it was.
        sent: when it was sent, which is later if the client was late.
        chunks: when each piece of output came. A role, a finish reason or a count alone is none.
        ended: when the answer had ended, or failed.
        prompt_tokens, completion_tokens: as the server counted them, None if it did not.
        finished: a finish reason or the mark of the stream's end came.
        failure: None, or the kind and the words of what left the answer incomplete.
    """

    due: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finished: bool = False
    failure: tuple[str, str] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the output: the server's count, or else one for each piece."""
        return self.completion_tokens or len(self.chunks)

    @property
    def late(self) -> float:
        return self.sent - self.due

    def latencies(self) -> dict[str, float]:
        """Seconds of a complete answer by name; there is no TPOT of a single token."""
        ttft, e2e = self.chunks[0] - self.sent, self.chunks[-1] - self.sent
        found = {"ttft": ttft, "e2e": e2e, "ttft_from_due": ttft + self.late, "e2e_from_due": e2e + self.late}
        return found | ({"tpot": (e2e - ttft) / (self.tokens - 1)} if self.tokens > 1 else {})

    def note(self, moment: float, data: bytes) -> None:
        """Read an event of the stream that came at ``moment``."""
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = json.loads(data)
            if usage := chunk.get("usage"):
                self.prompt_tokens, self.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if "error" in chunk:
                self.fail("error in the stream", str(chunk["error"]))
            outputs = [self._has_output(choice) for choice in chunk.get("choices") or ()]
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.fail("malformed chunk", data[:LONGEST_MESSAGE].decode(errors="replace"))
            return
        if any(outputs):
            self.chunks.append(moment)

    def _has_output(self, choice: dict[str, Any]) -> bool:
        self.finished = self.finished or choice.get("finish_reason") is not None
        delta = choice.get("delta") or {}
        return any(delta.get(name) for name in OUTPUTS)

    def close(self, moment: float) -> None:
        """End the answer; one that lacks its end or has no output has failed."""
        self.ended = moment
        if not self.finished:
            self.fail("cut short", "the stream ended without a finish reason and without [DONE]")
        elif not self.chunks:
            self.fail("no output", "the stream had no piece of text; is max_tokens spent on what is not shown?")

    def fail(self, kind: str, message: str) -> None:
        """Note a failure, unless there is an earlier one, which led to this."""
        self.failure = self.failure or (kind, " ".join(message.split())[:LONGEST_MESSAGE])


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Count, mean, percentiles and maximum of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    quantiles = {f"p{q}": float(value) for q, value in zip(QUANTILES, np.percentile(known, QUANTILES), strict=True)}
    return {"count": len(known), "mean": float(np.mean(known)), **quantiles, "max": float(max(known))}


def figures(exchanges: Sequence[Exchange], client_cpu: float) -> dict[str, Any]:
    """Compute the figures of one test from at least one exchange; times are in seconds.

    The page of the service, runtime/server/README.md, defines each figure. A latency is None where nothing was
    completed. ``client_cpu``: share of one CPU that the client took.
    """
    done = [each for each in exchanges if each.failure is None]
    seconds = max(each.ended for each in exchanges) - min(each.due for each in exchanges)
    latencies = [each.latencies() for each in done]
    late = distribution(each.late for each in exchanges)
    gaps = (gap for each in done for gap in np.diff(each.chunks).tolist())
    names = ("ttft", "tpot", "e2e", "ttft_from_due", "e2e_from_due")
    return {
        "requests": len(exchanges),
        "completed": len(done),
        "failed": len(exchanges) - len(done),
        "errors": count_errors(exchanges),
        "duration_s": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": sum(each.tokens for each in done) / seconds,
        "counted_by": "usage" if all(each.completion_tokens is not None for each in done) else "chunks",
        "prompt_tokens": distribution(each.prompt_tokens for each in done),
        "output_tokens": distribution(each.tokens for each in done),
        **{name: distribution(each.get(name) for each in latencies) for name in names},
        "itl": distribution(gaps),
        "client_delay": late,
        "client_cpu": client_cpu,
        "behind": client_cpu > BUSY or (late is not None and late["p99"] > BEHIND_S),
    }


def count_errors(exchanges: Sequence[Exchange]) -> dict[str, dict[str, Any]]:
    """Failures by kind, with what the first of each said."""
    found: dict[str, dict[str, Any]] = {}
    for kind, message in (each.failure for each in exchanges if each.failure is not None):
        found.setdefault(kind, {"count": 0, "first": message})["count"] += 1
    return found
