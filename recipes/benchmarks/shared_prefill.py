"""Measure what short prompts gain that arrive together and share a call: each mix of lengths with and without.

Requests come before the engine's next step, once so that prompts may share a call and once so that each has its own, in
turns and with other prompts every time. What users see of it: the time to the first token, on average and of the one
that waits longest, and new tokens per second of all. Before that, the time of one call beside that of the calls whose
place it takes, also with rows that decode meanwhile. The bundle has to be built with ONNX Runtime 1.32 or newer.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from engine_measures import LONGEST_WAIT, Check, Found, opened, run, submitted, tokens

from llmc.runtime import Engine, Request, SamplingParams
from llmc.runtime.bench.client import Visit
from llmc.runtime.sessions import Batch, Phase, Session

# Tokens of prompts that arrive together.
MIXES = {
    "16 each": (16,) * 8,
    "32 each": (32,) * 8,
    "64 each": (64,) * 8,
    "16 to 64": (16, 60, 24, 33, 48, 20, 64, 40),
}
# Calls: so many prompts of so many tokens, beside so many rows that go on with a token after others.
CALLS = ((8, 16, 0), (8, 32, 0), (8, 64, 0), (8, 128, 0), (4, 32, 0), (2, 64, 0), (1, 64, 7), (1, 128, 7))
AFTER = 128  # tokens of the rows that go on
FIGURES = ("mean_s", "last_s", "tok_s")
WAYS = ("apart", "shared")
# Of the mean time to the first token, by mix.
MIN_GAIN = {"16 each": 1.8, "16 to 64": 1.2}


def call_of(phase: Phase, first_row: int, past: int, new: Sequence[int]) -> Batch:
    """So many ``new`` tokens of each row from the first one on, after ``past``, with logits of the last."""
    lengths, ids = np.array(new), np.array([tokens(max(new), first_row + row) for row in range(len(new))])
    shares = len(new) > 1 and max(new) > 1
    starts = np.array([0 if length > 1 else past for length in new])
    return Batch(phase, ids, starts, lengths[:, None] - 1, first_row, new_lengths=lengths if shares else None)


def measure_calls(session: Session, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by shape: of calls apart, and of the one in their place."""
    session.cache.reserve(8, 2 * AFTER)
    for array in session.cache.arrays:  # zeros that were never written all lie in one page
        array[:] = 0.01
    found = {}
    for prompts, new, steps in CALLS:
        ways = {
            "apart": [call_of(Phase.DECODE, 0, AFTER, [1] * steps)] * (steps > 0)
            + [call_of(Phase.PREFILL, steps + row, 0, [new]) for row in range(prompts)],
            "shared": [call_of(Phase.PREFILL, 0, AFTER, [1] * steps + [new] * prompts)],
        }
        name = f"{prompts} x {new}" + (f", {steps} steps" if steps else "")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for i in range(rounds + 1):
            for way, batches in ways.items():
                started = time.perf_counter()
                for batch in batches:
                    session.run(batch)
                seconds[way] += [time.perf_counter() - started] if i else []
        found[name] = seconds
    return found


def together(engine: Engine, lengths: Sequence[int], new_tokens: int, salt: int) -> dict[str, float]:
    """Seconds to the first token, the mean and the longest, and new tokens per second."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    visits = [Visit(0.0) for _ in lengths]
    requests = [
        Request(tokens(length, salt + i), params, on_delta=visit.note)
        for i, (length, visit) in enumerate(zip(lengths, visits, strict=True))
    ]
    started = time.monotonic()
    for handle in submitted(engine, requests):
        handle.result(LONGEST_WAIT)
    seconds = time.monotonic() - started
    first = [visit.tokens[0] - started for visit in visits]
    return {"mean_s": statistics.mean(first), "last_s": max(first), "tok_s": len(lengths) * new_tokens / seconds}


def apart(waiting: Sequence[Any]) -> list[Any]:
    """Nobody shares a call."""
    return list(waiting[:1])


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Those of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(ratios: Sequence[float]) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def measure(args: argparse.Namespace) -> Found:
    """All mixes, in both ways; round 0 is untimed."""
    found: dict[str, dict[str, list[dict[str, float]]]]
    found = {mix: {way: [] for way in WAYS} for mix in MIXES}
    with opened(args) as model:
        if not model.runner.session.packs_rows:
            raise SystemExit("prompts cannot share a call here; build the bundle with ONNX Runtime 1.32 or newer")
        calls = measure_calls(model.runner.session, args.rounds)
        for i in range(args.rounds + 1):
            for mix, lengths in MIXES.items():
                for way in WAYS[:: 1 if i % 2 else -1]:
                    runner = model.engine._runner
                    with mock.patch.object(runner, "share", apart if way == "apart" else runner.share):
                        measured = together(model.engine, lengths, args.new_tokens, 1000 * i)
                    found[mix][way] += [measured] if i else []
    checks, lines = [], [("prompts", "mean first token, ms", "last first token, ms", "new tokens/s")]
    for mix, ways in found.items():
        of = {way: {figure: [each[figure] for each in rounds] for figure in FIGURES} for way, rounds in ways.items()}
        for way in WAYS:
            mean, last, rate = (statistics.median(of[way][figure]) for figure in FIGURES)
            lines.append((f"{mix}, {way}", f"{mean * 1e3:.0f}", f"{last * 1e3:.0f}", f"{rate:.1f}"))
        gains = [quotients(of["apart"][figure], of["shared"][figure]) for figure in FIGURES[:2]]
        gains.append(quotients(of["shared"]["tok_s"], of["apart"]["tok_s"]))
        lines.append((f"{mix}, gain", *map(spread, gains)))
        if mix in MIN_GAIN:
            checks.append(
                Check(f"prompts of {mix}: mean first token, times sooner", statistics.median(gains[0]), MIN_GAIN[mix])
            )
    call_lines = [("calls, ms", *WAYS, "gain (least to most)")]
    for name, seconds in calls.items():
        medians = [f"{statistics.median(seconds[way]) * 1e3:.0f}" for way in WAYS]
        call_lines.append((name, *medians, spread(quotients(seconds["apart"], seconds["shared"]))))
    return Found(checks, {"new_tokens": args.new_tokens, "calls": calls, "mixes": found}, [call_lines, lines])


def main() -> None:
    """Print the figures."""
    run(measure, __doc__, rounds=6, new_tokens=(32, "tokens that each request generates"))


if __name__ == "__main__":
    main()
