"""Measure the sampler alone: microseconds per token at a large vocabulary, for several settings and distributions.

``flat`` are logits as random weights give them (the nucleus of top-p 0.95 holds most of the vocabulary), ``peaked``
logits as trained models give them (a few candidates above a long tail). Pin it to a quiet core: taskset -c 1 python ...
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import provenance, table

from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler

VOCABULARY = 151_936  # of Qwen2.5
CALLS = 1000
PROMPT = 1000  # tokens that penalties look at
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top-p 0.5": {"temperature": 0.8, "top_p": 0.5},
    "temperature 0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "temperature 0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature 0.2, top-p 0.95": {"temperature": 0.2, "top_p": 0.95},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "top-p 0.95, penalties": {"top_p": 0.95, **PENALTIES},
    "top-k 50, top-p 0.95, penalties": {"top_k": 50, "top_p": 0.95, **PENALTIES},
    "top-k 50, DRY, no repeated 3-gram": {"top_k": 50, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3},
    "top-p 0.95, 5 log-probabilities": {"top_p": 0.95, "logprobs": 5},
    "typical 0.95": {"typical_p": 0.95},
    "min-p 0.05, XTC": {"min_p": 0.05, "xtc_probability": 0.5},
    "top-p 0.95, dynamic temperature": {"top_p": 0.95, "dynatemp_range": 0.5},
    "mirostat 2": {"mirostat": 2},
}


def flat(generator: np.random.Generator, vocabulary: int) -> npt.NDArray[np.float32]:
    """Logits that make the vocabulary almost equally probable."""
    return generator.normal(0.0, 0.6, vocabulary).astype(np.float32)


def peaked(generator: np.random.Generator, vocabulary: int) -> npt.NDArray[np.float32]:
    """Logits with a dozen candidates, each less than half as probable as the one before it on average."""
    logits = generator.normal(-2.0, 2.5, vocabulary).astype(np.float32)
    places = generator.integers(0, vocabulary, 12)
    logits[places] = 18.0 - np.arange(12) + generator.normal(0.0, 0.5, 12)
    return logits


def measure(sampling: dict[str, Any], rows: list[npt.NDArray[np.float32]], calls: int) -> dict[str, float]:
    """Median, 95th percentile and mean microseconds per call; the rows take turns, so the caches see fresh logits."""
    sampler = make_sampler(SamplingContext(SamplingParams(seed=0, **sampling), rows[0].size, prompt_length=PROMPT))
    microseconds = []
    tokens = list(range(PROMPT))
    for position in range(-20, calls):  # the first ones warm up
        started = time.perf_counter_ns()
        tokens.append(sampler(rows[position % len(rows)], tokens).token)
        microseconds.append((time.perf_counter_ns() - started) / 1e3)
    timed = microseconds[20:]
    p95 = statistics.quantiles(timed, n=20)[-1]
    return {"median": statistics.median(timed), "p95": p95, "mean": statistics.fmean(timed)}


def main() -> None:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="number of logits")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls per row of the table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    logits = {make.__name__: [make(generator, args.vocabulary) for _ in range(4)] for make in (flat, peaked)}
    rows = [
        {"sampling": setting, "logits": name, **measure(sampling, rows, args.calls)}
        for setting, sampling in SETTINGS.items()
        for name, rows in logits.items()
    ]
    if args.json:
        print(json.dumps({**provenance(), "vocabulary": args.vocabulary, "numpy": np.__version__, "rows": rows}))
        return
    head = (f"sampler, vocabulary {args.vocabulary}, µs per token", "median", "p95", "mean")
    print(table(head, *((f"{r['sampling']}; {r['logits']}", *(f"{r[k]:.0f}" for k in head[1:])) for r in rows)))


if __name__ == "__main__":
    main()
