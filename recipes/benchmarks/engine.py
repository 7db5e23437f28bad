"""Measure the engine against itself: what is compared takes turns on one loaded bundle, so ratios hold.

python engine.py concurrency BUNDLE  # 8 requests together, and gaps of streams beside a long prompt
python engine.py overhead BUNDLE     # time between two runs of ONNX Runtime, beside that inside one
python engine.py prefixes BUNDLE     # time to first token with a prefix in memory, and on disk after a restart
python engine.py speculation BUNDLE  # tokens per second with drafts, beside none
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
from machine import Disturbance, in_turns, positive, publish, ratio, table

from llmc.runtime import Engine, Model, Request, SamplingParams, load
from llmc.runtime.bench.benchmark import Clock, draw_prompt
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.speculation.drafters import PromptLookup

ROWS, STREAMS = 8, 4
SHORT, SETTLED = 32, 216  # tokens of a stream's prompt, and those that it makes before a long prompt comes
PATIENCE_S = 600.0
RIGHT = 0.8  # share of the oracle's tokens that are right
FORCED = 1e4  # above every logit
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
Rows = list[tuple[str, ...]]


def greedy(prompt: list[int], new_tokens: int, visit: Clock | None = None, **options: Any) -> Request:
    """A request for exactly so many tokens; ``options`` are sampling parameters."""
    params = SamplingParams(**{"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True, **options})
    return Request(prompt, params, on_delta=visit and visit.note)


def open_model(args: argparse.Namespace, **options: Any) -> Model:
    """The bundle loaded, without a prefix cache unless ``options`` ask for one."""
    if "prefix_cache_folder" not in options:
        options["prefix_cache_bytes"] = 0
    return load(args.bundle, threads=args.threads, self_test=False, **options)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run_together(engine: Engine, requests: Sequence[Request]) -> None:
    for handle in [engine.submit(request) for request in requests]:
        handle.result(PATIENCE_S)


# -------------------------------------------------------------------------------------------------------- concurrency


def concurrency(args: argparse.Namespace) -> Rows:
    """Eight requests one after another beside all at once; gaps of four streams beside a long prompt and before it."""
    with open_model(args) as model:
        vocabulary = model.manifest.geometry.vocab_size

        def batch(number: int) -> list[Request]:
            return [greedy(draw_prompt(vocabulary, args.prompt, number, i), args.new_tokens) for i in range(ROWS)]

        ways = {
            "alone": lambda number: seconds(lambda: [run_together(model.engine, [each]) for each in batch(number)]),
            "together": lambda number: seconds(lambda: run_together(model.engine, batch(number))),
        }
        took = in_turns(ways, args.rounds)
        gaps = [gaps_beside(model, args, number) for number in range(args.rounds + 1)][1:]
    before, beside = zip(*gaps, strict=True)
    medians = [statistics.median(took[way]) for way in ("alone", "together")]
    return [
        ("", "before", "after", "ratio"),
        (f"s, {ROWS} requests one by one; together", *(f"{s:.2f}" for s in medians), ratio(*took.values())),
        (
            f"ms, p95 gap of {STREAMS} streams; beside a prompt of {args.long_prompt}",
            *(f"{statistics.median(own) * 1e3:.1f}" for own in (before, beside)),
            ratio(beside, before),
        ),
    ]


def gaps_beside(model: Model, args: argparse.Namespace, number: int) -> tuple[float, float]:
    """The 95th percentile of the streams' gaps in seconds, before and beside the prefill of a long prompt."""
    engine, vocabulary = model.engine, model.manifest.geometry.vocab_size
    visits, first = [Clock() for _ in range(STREAMS)], Clock()
    streams = [
        engine.submit(greedy(draw_prompt(vocabulary, SHORT, number, i), engine.max_context - SHORT, visit))
        for i, visit in enumerate(visits)
    ]
    while min(len(visit.tokens) for visit in visits) < SETTLED:
        time.sleep(0.01)
    submitted = time.monotonic()
    prompt = draw_prompt(vocabulary, args.long_prompt, number, STREAMS)
    engine.submit(greedy(prompt, 1, first)).result(PATIENCE_S)
    time.sleep(0.2)  # the last gap ends after the prompt's first token
    for stream in streams:
        stream.cancel()
    spans = ((visits[0].tokens[SETTLED // 2], submitted), (submitted, first.tokens[0]))
    before, beside = ([gap for visit in visits for gap in gaps_within(visit.tokens, *span)] for span in spans)
    return float(np.percentile(before, 95)), float(np.percentile(beside, 95))


def gaps_within(times: Sequence[float], start: float, end: float) -> list[float]:
    """Gaps between tokens that came at ``times``, of those that overlap the time from ``start`` to ``end``."""
    return [after - before for before, after in itertools.pairwise(times) if after > start and before < end]


# ----------------------------------------------------------------------------------------------------------- overhead


def overhead(args: argparse.Namespace) -> Rows:
    """Medians of the time inside ONNX Runtime and between two runs while all rows decode."""
    spans: list[tuple[float, float]] = []
    original = onnxruntime.InferenceSession.run_with_iobinding

    def timed(*given: Any, **options: Any) -> None:
        started = time.perf_counter()
        original(*given, **options)
        spans.append((started, time.perf_counter()))

    def step(rows: int, sampling: dict[str, float], number: int) -> tuple[float, float]:
        spans.clear()
        prompts = [draw_prompt(model.manifest.geometry.vocab_size, SHORT, number, row) for row in range(rows)]
        run_together(model.engine, [greedy(prompt, args.new_tokens, **sampling) for prompt in prompts])
        steps = spans[len(spans) // 2 :]  # when all rows decode
        between = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
        return statistics.median(end - start for start, end in steps), statistics.median(between)

    kinds = {
        f"{rows} rows, {name}": (rows, sampling)
        for rows in (1, ROWS)
        for name, sampling in (("greedy", {}), ("temperature 0.8, top-p 0.95", SAMPLED))
    }
    with open_model(args) as model, patch.object(onnxruntime.InferenceSession, "run_with_iobinding", timed):
        ways = {name: (lambda number, kind=kind: step(*kind, number)) for name, kind in kinds.items()}
        found = in_turns(ways, args.rounds)
    lines: Rows = [("ms of a step", "inside", "between", "between / inside")]
    for name, rounds in found.items():
        inside, between = zip(*rounds, strict=True)
        medians = (f"{statistics.median(own) * 1e3:.3f}" for own in (inside, between))
        lines.append((name, *medians, ratio(between, inside)))
    return lines


# ----------------------------------------------------------------------------------------------------------- prefixes


def prefixes(args: argparse.Namespace) -> Rows:
    """Time to first token after a prefix that nobody has seen, that memory holds, and that the disk holds."""
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = reopen_model(args, Path(temporary))
        vocabulary = model.manifest.geometry.vocab_size
        try:
            for number in range(args.rounds + 1):
                found = {}
                prefix = draw_prompt(vocabulary, args.prefix, number, 0)
                for i, source in enumerate(("cold", "memory", "disk"), 1):
                    if source == "disk":
                        model.close()
                        model = reopen_model(args, Path(temporary))
                    found[source] = first_token(model, prefix + draw_prompt(vocabulary, 16, number, i))
                rounds += [found] if number else []
        finally:
            model.close()
    of = {source: [found[source] for found in rounds] for source in rounds[0]}
    return [
        (f"time to first token, prefix of {args.prefix}", "ms", "beside cold"),
        *((name, f"{statistics.median(own) * 1e3:.1f}", ratio(own, of["cold"])) for name, own in of.items()),
    ]


def reopen_model(args: argparse.Namespace, folder: Path) -> Model:
    """The bundle with a prefix cache on disk, whose files are out of the page cache; a short request has warmed up."""
    for path in folder.rglob("*") if hasattr(os, "posix_fadvise") else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = open_model(args, prefix_cache_folder=folder)
    first_token(model, draw_prompt(model.manifest.geometry.vocab_size, 16, 0, 99))
    return model


def first_token(model: Model, prompt: list[int]) -> float:
    return model.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True).timings.ttft_s


# -------------------------------------------------------------------------------------------------------- speculation


class Oracle:
    """A drafter that knows how a text goes on, and is wrong about a fixed share of the tokens."""

    costs_by_token = False

    def __init__(self, right: float) -> None:
        self._right, self._generator, self.whole = right, np.random.default_rng(0), list[int]()

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        known = np.array(self.whole[len(tokens) : len(tokens) + count], int)
        return (known ^ (self._generator.random(len(known)) >= self._right)).tolist()

    def forget(self, key: int) -> None:
        """It keeps nothing per sequence."""

    def close(self) -> None:
        """Nothing to free."""


def speculation(args: argparse.Namespace) -> Rows:
    """An oracle's drafts on a text that all runs are held to; prompt lookup on text that repeats itself and on other;
    drafts that are always wrong."""
    oracle = Oracle(RIGHT)
    lines: Rows = [("tokens per second", "without drafts", "with", "accepted", "ratio")]
    for name, drafter, repeats, sampling in (
        (f"oracle, {RIGHT:.0%} right", oracle, 1, {}),
        ("prompt lookup, repetitive text", PromptLookup(), 4, {}),
        ("prompt lookup, free text", PromptLookup(), 1, {"temperature": 1.0}),
        ("always wrong, free text", Oracle(0.0), 1, {"temperature": 1.0}),
    ):
        with patch("llmc.runtime.model.make_drafter", return_value=drafter), open_model(args) as model:
            lines.append((name, *compare_speeds(model, args, drafter, repeats, sampling)))
    return lines


def compare_speeds(
    model: Model, args: argparse.Namespace, drafter: object, repeats: int, sampling: dict[str, float]
) -> Iterator[str]:
    """Cells of the table: speeds without and with drafts, the share that was accepted, the ratio."""
    drafted = accepted = 0

    def speed(speculates: bool, number: int) -> float:
        nonlocal drafted, accepted
        prompt = draw_prompt(model.manifest.geometry.vocab_size, args.prompt // repeats, number, 0) * repeats
        request = greedy(prompt, args.new_tokens, speculate=False, seed=number, **sampling)
        if isinstance(drafter, Oracle):  # which has to know the text, and random weights leave ties
            drafter.whole = [*prompt, *model.engine.submit(request).result(PATIENCE_S).token_ids]
            request = replace(request, logits_processors=(hold_to(drafter.whole),))
        request = replace(request, params=replace(request.params, speculate=speculates))
        result = model.engine.submit(request).result(PATIENCE_S)
        drafted, accepted = drafted + result.metrics.drafted, accepted + result.metrics.accepted
        return float(result.timings.decode_tokens_per_s)

    found = in_turns({way: (lambda n, way=way: speed(way == "with", n)) for way in ("without", "with")}, args.rounds)
    yield from (f"{statistics.median(own):.1f}" for own in found.values())
    yield f"{accepted / max(drafted, 1):.0%}"
    yield ratio(found["with"], found["without"])


def hold_to(whole: Sequence[int]) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    """A logits processor that makes the text go on as ``whole`` does."""

    def force(so_far: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[whole[len(so_far)]] = FORCED
        return logits

    return force


MEASUREMENTS = {each.__name__: each for each in (concurrency, overhead, prefixes, speculation)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("bundle", type=Path, help="built with --max-batch 8")
    parser.add_argument("--threads", type=positive, default=usable_threads())
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds; medians count")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of prompts")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens of answers")
    parser.add_argument("--long-prompt", type=positive, default=2000, help="tokens that are fed beside streams")
    parser.add_argument("--prefix", type=positive, default=1000, help="tokens that requests have in common")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    meanwhile = Disturbance()
    lines = MEASUREMENTS[args.measurement](args)
    publish(args.json, meanwhile.cpus(), [table(*lines)], rows=lines)


if __name__ == "__main__":
    main()
