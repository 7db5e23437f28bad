"""Measure what a step costs beside the model: choosing tokens, detokenizing, scheduling, filling the next call.

That is the time between two runs of ONNX Runtime while all rows decode, beside the runs themselves. Its parts: the
session (binding inputs, reading outputs) and the rest. Rows are greedy, or of mixed settings, or all of the settings
that --settings names; their logits are the model's own, or those of the sampler's benchmark with a few candidates above
a long tail, because random weights give flatter logits than trained ones.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import onnxruntime
from engine_measures import Check, Found, opened, run, run_batch, tokens
from sampling import SETTINGS, peaked

from llmc.runtime import Request, SamplingParams
from llmc.runtime.sessions import Batch

MAX_SHARE = 0.1  # of the time inside ONNX Runtime
MIXED = (
    "greedy",
    "temperature 0.8, top-p 0.95",
    "temperature 0.8, top-k 50, top-p 0.95",
    "temperature 0.8, min-p 0.05",
    "top-p 0.95, penalties",
    "top-k 50, DRY, no repeated 3-gram",
    "mirostat 2",
    "top-p 0.95, 5 log-probabilities",
)
PEAKED_SETS = 4  # different logits, so that the caches see fresh ones


class Call(NamedTuple):
    """One call of the session: when it was entered, ran inside ONNX Runtime, and was left."""

    rows: int
    tokens: int
    entered: float
    started: float
    ended: float
    left: float


@contextmanager
def recorded_calls(session: Any, logits: list[np.ndarray] | None) -> Iterator[list[Call]]:
    """Every call inside the block; ``logits`` [rows, 1, V] take turns in the place of the model's."""
    inside, original = onnxruntime.InferenceSession.run_with_iobinding, session.run
    calls: list[Call] = []
    spans: list[tuple[float, float]] = []

    def timed(*args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        inside(*args, **kwargs)
        spans.append((started, time.perf_counter()))

    def run(batch: Batch) -> np.ndarray:
        entered = time.perf_counter()
        found = original(batch)
        calls.append(Call(*batch.input_ids.shape, entered, *spans[-1], time.perf_counter()))
        if logits is None or not found.shape[1]:
            return found
        return logits[len(calls) % len(logits)][: len(found)]

    with patch.object(onnxruntime.InferenceSession, "run_with_iobinding", timed), patch.object(session, "run", run):
        yield calls


def summarize(calls: list[Call], rows: int) -> dict[str, float]:
    """Medians in milliseconds over the steps of a full batch that follow one another: inside a run, between two.

    ``session_ms`` is the session's part of the time between, and ``share`` that time over the time inside.

    Raises:
        SystemExit: there are none.
    """
    pairs = [pair for pair in itertools.pairwise(calls) if all((c.rows, c.tokens) == (rows, 1) for c in pair)]
    if not pairs:
        raise SystemExit(f"the batch never had {rows} rows; ask for more new tokens")
    seconds = {
        "compute_ms": [last.ended - last.started for _, last in pairs],
        "between_ms": [last.started - first.ended for first, last in pairs],
        "session_ms": [first.left - first.ended + last.started - last.entered for first, last in pairs],
    }
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    return {"steps": len(pairs), **medians, "share": medians["between_ms"] / medians["compute_ms"]}


def batch_of(names: Sequence[str], rows: int, prompt: int, new_tokens: int) -> list[Request]:
    """One request per row."""
    return [
        Request(
            tokens(prompt, row),
            SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=row, **SETTINGS[names[row % len(names)]]),
        )
        for row in range(rows)
    ]


def measure(args: argparse.Namespace) -> Found:
    """Batches of each kind, on both kinds of logits, in turns over all rounds; then one more under the profiler."""
    batches = {name: (name,) for name in args.settings} or {"greedy": ("greedy",), "mixed": MIXED}
    kinds = [(settings, logits) for settings in batches for logits in ("model's", "peaked")]
    calls: dict[tuple[str, str], list[Call]] = {kind: [] for kind in kinds}
    with opened(args, max_batch=args.rows) as model:
        generator, vocab = np.random.default_rng(0), model.manifest.geometry.vocab_size
        peaks = [np.stack([peaked(generator, vocab) for _ in range(args.rows)])[:, None] for _ in range(PEAKED_SETS)]
        engine, session = model.engine, model.runner.session

        def step(settings: str, logits: str) -> list[Call]:
            with recorded_calls(session, peaks if logits == "peaked" else None) as found:
                run_batch(engine, batch_of(batches[settings], args.rows, args.prompt, args.new_tokens))
            return found

        run_batch(engine, batch_of(MIXED, args.rows, args.prompt, args.rows + 8))  # untimed
        for _ in range(args.rounds):
            for kind in kinds:
                calls[kind] += step(*kind)
        if args.profile:  # the engine's thread; helpers that sample are seen as waiting
            profile = cProfile.Profile()
            engine.call(profile.enable)
            step(*kinds[-1])
            engine.call(profile.disable)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    found = [
        {"settings": settings, "logits": logits, **summarize(made, args.rows)}
        for (settings, logits), made in calls.items()
    ]
    checks = [
        Check(f"{k['settings']}, {k['logits']} logits: between calls / inside", k["share"], MAX_SHARE, at_most=True)
        for k in found
    ]
    head = (f"{args.rows} rows, vocabulary {vocab}", "inside, ms", "between, ms", "session, ms")
    parts = ("compute_ms", "between_ms", "session_ms")
    rows = [(f"{k['settings']}, {k['logits']}", *(f"{k[part]:.3f}" for part in parts)) for k in found]
    return Found(checks, {"rows": args.rows, "vocabulary": vocab, "mixed": MIXED, "kinds": found}, [(head, *rows)])


def main() -> None:
    """Print the figures."""
    run(
        measure,
        __doc__,
        rows=(8, "requests in the batch"),
        prompt=(128, "tokens of their prompts"),
        new_tokens=(48, "tokens that each generates"),
        settings=((), "settings of sampling.py by name, in place of greedy and mixed"),
        profile=(False, "profile the engine's thread on one more batch of the last kind"),
    )


if __name__ == "__main__":
    main()
