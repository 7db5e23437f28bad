"""Measure what a step of a full batch costs beside the model: choosing tokens, scheduling, filling the next call.

That is the time between two runs of ONNX Runtime while all rows decode, beside the runs themselves. Its parts: the
session (binding inputs, reading outputs) and the rest (sampling, detokenizing, scheduling). Rows are greedy, or of
mixed settings; their logits are the model's own, or those of the sampler's benchmark with a few candidates above a long
tail, because random weights give flatter logits than trained ones.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from engine_measures import Check, OtherLoad, Report, arguments, engine_on, print_rows, submitted, tokens
from python_overhead import engine_runs
from sampling import SETTINGS, peaked

from llmc.runtime import Model, Request, SamplingParams, load
from llmc.runtime.engine.engine import Engine
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
LONGEST_WAIT = 600.0  # seconds


@dataclass(frozen=True)
class Call:
    """One call of the session: when it was entered, ran inside ONNX Runtime, and was left."""

    rows: int
    tokens: int
    entered: float
    started: float
    ended: float
    left: float


@dataclass(frozen=True)
class Overhead:
    """Medians in milliseconds per step of a full batch."""

    settings: str
    logits: str
    steps: int
    compute_ms: float
    between_ms: float
    session_ms: float

    @property
    def share(self) -> float:
        """Time between two runs over time inside one."""
        return self.between_ms / self.compute_ms


@contextmanager
def recorded_calls(session: Any, logits: list[np.ndarray] | None) -> Iterator[list[Call]]:
    """Every call inside the block; ``logits`` [rows, 1, V] take turns in the place of the model's."""
    original, calls = session.run, []
    with engine_runs() as runs:

        def run(batch: Batch) -> np.ndarray:
            entered = time.perf_counter()
            found = original(batch)
            calls.append(Call(*batch.input_ids.shape, entered, *runs[-1], time.perf_counter()))
            if logits is None or not found.shape[1]:
                return found
            return logits[len(calls) % len(logits)][: len(found)]

        session.run = run
        try:
            yield calls
        finally:
            del session.run


def summarize(settings: str, logits: str, calls: list[Call], rows: int) -> Overhead:
    """Medians over the steps of a full batch that follow one another.

    Raises:
        SystemExit: there are none.
    """
    pairs = [pair for pair in itertools.pairwise(calls) if all((c.rows, c.tokens) == (rows, 1) for c in pair)]
    if not pairs:
        raise SystemExit(f"the batch never had {rows} rows; ask for more new tokens")
    return Overhead(
        settings,
        logits,
        len(pairs),
        compute_ms=statistics.median(last.ended - last.started for _, last in pairs) * 1e3,
        between_ms=statistics.median(last.started - first.ended for first, last in pairs) * 1e3,
        session_ms=statistics.median(first.left - first.ended + last.started - last.entered for first, last in pairs)
        * 1e3,
    )


def batch_of(names: tuple[str, ...], rows: int, prompt: int, new_tokens: int) -> list[Request]:
    """One request per row."""
    return [
        Request(
            tokens(prompt, row),
            SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=row, **SETTINGS[names[row % len(names)]]),
        )
        for row in range(rows)
    ]


def run_batch(engine: Engine, requests: list[Request]) -> None:
    """All at once, to the end."""
    for handle in submitted(engine, requests):
        handle.result(LONGEST_WAIT)


def measure(model: Model, args: argparse.Namespace, profile: cProfile.Profile | None = None) -> Report:
    """Greedy and mixed batches, on both kinds of logits, in turns over all rounds."""
    meanwhile, report = OtherLoad(), Report.of(model)
    generator, vocab = np.random.default_rng(0), model.manifest.geometry.vocab_size
    prepared = [np.stack([peaked(generator, vocab) for _ in range(args.rows)])[:, None] for _ in range(PEAKED_SETS)]
    batches = {"greedy": ("greedy",), "mixed": MIXED}
    kinds = [(settings, logits) for settings in batches for logits in ("model's", "peaked")]
    calls: dict[tuple[str, str], list[Call]] = {kind: [] for kind in kinds}
    with engine_on(model, max_batch=args.rows) as engine:
        run_batch(engine, batch_of(MIXED, args.rows, args.prompt, args.rows + 8))  # untimed
        for _ in range(args.rounds):
            for settings, logits in kinds:
                requests = batch_of(batches[settings], args.rows, args.prompt, args.new_tokens)
                with recorded_calls(model.runner.session, prepared if logits == "peaked" else None) as found:
                    with profiled(engine, profile if (settings, logits) == ("mixed", "peaked") else None):
                        run_batch(engine, requests)
                calls[settings, logits] += found
    found = [summarize(*kind, made, args.rows) for kind, made in calls.items()]
    report.checks = [
        Check(f"{item.settings}, {item.logits} logits: between calls / inside", item.share, MAX_SHARE, True)
        for item in found
    ]
    report.details = {
        "rows": args.rows,
        "vocabulary": vocab,
        "mixed": MIXED,
        "kinds": [{**asdict(item), "share": item.share} for item in found],
    }
    report.other_cpus = meanwhile.cpus()
    return report


@contextmanager
def profiled(engine: Engine, profile: cProfile.Profile | None) -> Iterator[None]:
    """Profile the engine's thread inside the block; helpers that sample are seen as waiting."""
    if profile is None:
        yield
        return
    engine.call(profile.enable)
    try:
        yield
    finally:
        engine.call(profile.disable)


def main() -> None:
    """Print the figures."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, default=8, help="requests in the batch")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of their prompts")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens that each generates")
    parser.add_argument("--profile", action="store_true", help="also profile the engine's thread, which disturbs")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    with load(args.bundle, threads=args.threads, self_test=False) as model:
        report = measure(model, args, profile)
    report.write(args.json)
    head = (f"{args.rows} rows, vocabulary {report.details['vocabulary']}", "inside, ms", "between, ms", "session, ms")
    rows = [
        (f"{k['settings']}, {k['logits']}", *(f"{k[name]:.3f}" for name in ("compute_ms", "between_ms", "session_ms")))
        for k in report.details["kinds"]
    ]
    print()
    print_rows(head, rows)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
