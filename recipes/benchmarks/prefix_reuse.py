"""Measure what a repeated prefix saves: time to first token without it, from memory, and from disk after a restart.

Every round takes a prefix that nobody has seen, and asks three questions after it: cold; the same prefix again; and
once more after the model was closed and loaded again, and the pages of the prefix's files were dropped where the system
can do that. The time of a restart itself is not counted, and neither is one short request after each, which allocates.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_measures import Check, OtherLoad, Report, arguments, median_ratio, tokens

from llmc.runtime import Model, Request, SamplingParams, load

MAX_SHARE, MAX_SHARE_FROM_DISK = 0.05, 0.15
LONGEST_WAIT = 600.0  # seconds


@dataclass(frozen=True)
class Round:
    """Seconds to the first token, and tokens that came from the cache."""

    cold_s: float
    memory_s: float
    disk_s: float
    memory_tokens: int
    disk_tokens: int


def ask(model: Model, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    result = model.submit(Request(prompt, params)).result(LONGEST_WAIT)
    return result.timings.ttft_s, result.usage.cached_tokens


def open_model(args: argparse.Namespace, folder: Path) -> Model:
    """The bundle with a prefix cache on disk, warm but for it."""
    model = load(args.bundle, threads=args.threads, self_test=False, prefix_cache_folder=folder)
    ask(model, tokens(16, 1))
    return model


def drop_pages(folder: Path) -> None:
    """Have the next read come from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def measure(args: argparse.Namespace, folder: Path) -> Report:
    """All rounds; the first model is also asked an untimed question as long as the others."""
    meanwhile, rounds = OtherLoad(), []
    model = open_model(args, folder)
    try:
        report = Report.of(model)
        ask(model, tokens(args.prefix + args.question, 2))
        for i in range(args.rounds):
            prefix = tokens(args.prefix, 1000 + i)
            questions = [tokens(args.question, 10 * (i + 1) + k) for k in range(3)]
            cold_s, none = ask(model, prefix + questions[0])
            memory_s, memory_tokens = ask(model, prefix + questions[1])
            model.close()
            drop_pages(folder)
            model = open_model(args, folder)
            disk_s, disk_tokens = ask(model, prefix + questions[2])
            assert none == 0, "the cold question was not cold"
            rounds.append(Round(cold_s, memory_s, disk_s, memory_tokens, disk_tokens))
    finally:
        model.close()
    cold = [r.cold_s for r in rounds]
    report.checks = [
        Check(f"prefix of {args.prefix} again: TTFT / cold", median_ratio([r.memory_s for r in rounds], cold),
              MAX_SHARE, True),
        Check("after a restart, from disk: TTFT / cold", median_ratio([r.disk_s for r in rounds], cold),
              MAX_SHARE_FROM_DISK, True),
        Check("prefix tokens from the cache, share", min(min(r.memory_tokens, r.disk_tokens) for r in rounds)
              / args.prefix, 0.9),
    ]  # fmt: skip
    report.details = {"prefix": args.prefix, "question": args.question, "rounds": [asdict(r) for r in rounds]}
    report.other_cpus = meanwhile.cpus()
    return report


def main() -> None:
    """Print the figures."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that requests have in common")
    parser.add_argument("--question", type=int, default=16, help="tokens after them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report = measure(args, Path(temporary))
    report.write(args.json)
    medians = {k: statistics.median(r[k] for r in report.details["rounds"]) for k in ("cold_s", "memory_s", "disk_s")}
    print("\ntime to first token: " + ", ".join(f"{key[:-2]} {value * 1e3:.1f} ms" for key, value in medians.items()))


if __name__ == "__main__":
    main()
