"""Measure what llmc's own Python adds to a decode step: everything between two runs of the engine.

That is sampling, detokenizing, stop strings, bookkeeping and filling the next call's inputs. Two measurements:

* the whole loop: gaps between consecutive engine runs while a bundle generates (give a bundle of 152k vocabulary);
* the sampler alone on synthetic logits of that size, because random weights give flatter logits than trained ones.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from llmc.runtime import Model, SamplingParams, load
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler

MICROSECONDS = 1e6
PROMPT = list(range(10, 42))
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 0},
}
# Standard deviations of normal logits: random weights give about 1, trained models several.
SHARPNESS = {"flat": 1.0, "peaked": 4.0}
SAMPLER_CALLS = 200


@contextmanager
def engine_runs() -> Iterator[list[tuple[float, float]]]:
    """Start and end, in seconds, of every run of ONNX Runtime inside the block."""
    original = onnxruntime.InferenceSession.run_with_iobinding
    runs: list[tuple[float, float]] = []

    def timed(*args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        original(*args, **kwargs)
        runs.append((started, time.perf_counter()))

    onnxruntime.InferenceSession.run_with_iobinding = timed
    try:
        yield runs
    finally:
        onnxruntime.InferenceSession.run_with_iobinding = original


def measure_loop(model: Model, sampling: dict[str, Any], new_tokens: int) -> tuple[float, float]:
    """Median seconds per decode step: inside the engine, and between two of its runs."""
    with engine_runs() as runs:
        model.generate(PROMPT, max_tokens=new_tokens, ignore_eos=True, **sampling)
    decode = runs[-(new_tokens - 1) :]  # what comes before is prefill
    inside = [end - start for start, end in decode]
    between = [start - end for (_, end), (start, _) in itertools.pairwise(decode)]
    return statistics.median(inside), statistics.median(between)


def measure_sampler(sampling: dict[str, Any], vocabulary: int, sharpness: float) -> float:
    """Median seconds per call of a sampler on normal logits with standard deviation ``sharpness``."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((8, vocabulary), np.float32) * np.float32(sharpness)
    sampler = make_sampler(SamplingContext(SamplingParams(**sampling), vocabulary, prompt_length=0))
    seconds: list[float] = []
    tokens: list[int] = []
    for position in range(SAMPLER_CALLS):
        started = time.perf_counter()
        tokens.append(sampler(logits[position % len(logits)], tokens).token)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def print_loop(bundle: Path, new_tokens: int) -> None:
    """Print the whole loop's table."""
    with load(bundle) as model:
        vocabulary = model.manifest.geometry.vocab_size
        print(f"| decode step, vocabulary {vocabulary} | engine, ms | our Python, µs | share of the step |")
        print("|---|---:|---:|---:|")
        for name, sampling in SAMPLERS.items():
            measure_loop(model, sampling, new_tokens)  # warm up
            inside, between = measure_loop(model, sampling, new_tokens)
            share = between / (inside + between)
            print(f"| {name} | {inside * 1e3:.2f} | {between * MICROSECONDS:.0f} | {share:.2%} |")


def print_samplers(vocabulary: int) -> None:
    """Print the sampler's table."""
    print(f"| sampler alone, vocabulary {vocabulary}, µs | " + " | ".join(SHARPNESS) + " |")
    print("|---" + "|---:" * len(SHARPNESS) + "|")
    for name, sampling in SAMPLERS.items():
        seconds = [measure_sampler(sampling, vocabulary, sharpness) for sharpness in SHARPNESS.values()]
        print(f"| {name} | " + " | ".join(f"{s * MICROSECONDS:.0f}" for s in seconds) + " |")


def main() -> None:
    """Print both tables; without a bundle, the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="a bundle; without it only the sampler is measured")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="logits of the sampler's measurement")
    args = parser.parse_args()
    if args.bundle:
        print_loop(args.bundle, args.new_tokens)
        print()
    print_samplers(args.vocabulary)


if __name__ == "__main__":
    main()
