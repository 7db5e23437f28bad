"""Measure what a repeated prefix saves: time to first token without it, from memory, and from disk after a restart.

Every round takes a prefix that nobody has seen, and asks three questions after it: cold; the same prefix again; and
once more after the model was closed and loaded again, and the pages of the prefix's files were dropped where the system
can do that. The time of a restart itself is not counted, and neither is one short request after each, which allocates.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from engine_measures import LONGEST_WAIT, Check, Found, median_ratio, opened, run, tokens

from llmc.runtime import Model

MAX_SHARE, MAX_SHARE_FROM_DISK = 0.05, 0.15
SOURCES = ("cold", "memory", "disk")


def ask(model: Model, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens."""
    result = model.stream(prompt, max_tokens=1, temperature=0.0, ignore_eos=True).result(LONGEST_WAIT)
    return result.timings.ttft_s, result.usage.cached_tokens


def reopened(args: argparse.Namespace, folder: Path) -> Model:
    """The bundle with a prefix cache on disk, warm but for it: the next read of its files comes from the disk."""
    for path in folder.rglob("*") if hasattr(os, "posix_fadvise") else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = opened(args, prefix_cache_folder=folder)
    ask(model, tokens(16, 1))
    return model


def measure(args: argparse.Namespace) -> Found:
    """All rounds; the first model is also asked an untimed question as long as the others."""
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = reopened(args, Path(temporary))
        try:
            ask(model, tokens(args.prefix + args.question, 2))
            for i in range(args.rounds):
                prefix, answers = tokens(args.prefix, 1000 + i), {}
                for k, source in enumerate(SOURCES):
                    if source == "disk":
                        model.close()
                        model = reopened(args, Path(temporary))
                    answers[source] = ask(model, prefix + tokens(args.question, 10 * (i + 1) + k))
                assert answers["cold"][1] == 0, "the cold question was not cold"
                seconds = {f"{source}_s": answers[source][0] for source in SOURCES}
                rounds.append({**seconds, **{f"{source}_tokens": answers[source][1] for source in SOURCES[1:]}})
        finally:
            model.close()
    of = {name: [found[name] for found in rounds] for name in rounds[0]}
    cached = min(of["memory_tokens"] + of["disk_tokens"]) / args.prefix
    checks = [
        Check(f"prefix of {args.prefix} again: TTFT / cold", median_ratio(of["memory_s"], of["cold_s"]),
              MAX_SHARE, at_most=True),
        Check("after a restart, from disk: TTFT / cold", median_ratio(of["disk_s"], of["cold_s"]),
              MAX_SHARE_FROM_DISK, at_most=True),
        Check("prefix tokens from the cache, share", cached, 0.9),
    ]  # fmt: skip
    medians = [f"{statistics.median(of[f'{source}_s']) * 1e3:.1f}" for source in SOURCES]
    shown = [("time to first token, ms", *SOURCES), (f"{args.prefix} + {args.question} tokens", *medians)]
    return Found(checks, {"prefix": args.prefix, "question": args.question, "rounds": rounds}, [shown])


def main() -> None:
    """Print the figures."""
    options = {"prefix": (1000, "tokens that requests have in common"), "question": (16, "tokens after them")}
    run(measure, __doc__, rounds=5, **options)


if __name__ == "__main__":
    main()
