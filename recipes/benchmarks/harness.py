"""Common parts of the runners: the arguments, the prompts, the stopwatch, and the one line of JSON at the end.

Runners are plain scripts. Each runs in an interpreter that has its own system and need not have llmc, so this module
imports the standard library only; a script's own folder is on ``sys.path``, hence ``import harness``.
"""

import argparse
import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

WARM_UP_TOKENS = 4  # new tokens of the untimed call before each timed one: pages in, allocates, builds kernels
HIGHEST_RESIDENT_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS


@dataclass(frozen=True)
class Timing:
    """One generation, in seconds: until the first new token, and from the first new token to the last."""

    ttft_s: float
    decode_s: float


@dataclass(frozen=True)
class Job:
    """The work of a runner. Lengths in tokens; ``threads`` is the number of CPUs the process may use."""

    model: Path
    prompts: tuple[int, ...]
    new_tokens: int
    threads: int

    @property
    def context(self) -> int:
        """Cache positions that the longest generation needs."""
        return max(self.prompts) + self.new_tokens


@dataclass(frozen=True)
class Measurement:
    """Speed after one prompt length. Rates in tokens per second; ``decode`` leaves out the first new token."""

    prompt: int
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True)
class Report:
    """The JSON line of a runner. ``load_s`` in seconds; ``peak_rss_mb`` in 10^6 bytes, mapped weights included."""

    versions: dict[str, str]
    details: dict[str, str]
    load_s: float
    peak_rss_mb: int
    results: tuple[Measurement, ...]


class System(Protocol):
    """A system under test: opened once, then asked for greedy generations that ignore the end token."""

    def generate(self, prompt: list[int], new_tokens: int) -> Timing:
        """Generate exactly ``new_tokens`` tokens from an empty cache."""

    def details(self) -> dict[str, str]:
        """Say what helps to interpret the figures: threads, CPU features, bytes of weights."""


def prompt_ids(length: int, salt: int) -> list[int]:
    """Token ids of a prompt, the same for every system.

    ``salt`` is the number of the call in its process: it changes the first token, so no prefix cache can help.
    """
    return [i % 10_000 + 10 + salt for i in range(length)]


def time_steps(prefill: Callable[[], None], step: Callable[[], None], new_tokens: int) -> Timing:
    """Time a system that is driven token by token: ``prefill`` gives the first new token, each ``step`` one more."""
    started = time.perf_counter()
    prefill()
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        step()
    return Timing(first - started, time.perf_counter() - first)


def folder_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def main(open_system: Callable[[Job], System], packages: Sequence[str]) -> None:
    """Run a runner: read the arguments, measure every prompt length once, print the report as one line of JSON.

    ``packages`` are the distributions whose versions matter.
    """
    job = _parse_job()
    started = time.perf_counter()
    system = open_system(job)
    load_s = time.perf_counter() - started
    results = tuple(_measure(system, job, length, 2 * i) for i, length in enumerate(job.prompts))
    report = Report(
        versions={"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        details={"threads": str(job.threads), "files_mb": str(folder_bytes(job.model) // 10**6), **system.details()},
        load_s=round(load_s, 2),
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * HIGHEST_RESIDENT_UNIT // 10**6,
        results=results,
    )
    print(json.dumps(asdict(report)), flush=True)


def _measure(system: System, job: Job, length: int, salt: int) -> Measurement:
    """One untimed call with a prompt of the same length, then the timed one."""
    system.generate(prompt_ids(length, salt), WARM_UP_TOKENS)
    timing = system.generate(prompt_ids(length, salt + 1), job.new_tokens)
    return Measurement(
        prompt=length,
        prefill_tok_s=round(length / timing.ttft_s, 2),
        decode_tok_s=round((job.new_tokens - 1) / timing.decode_s, 2),
    )


def _parse_job() -> Job:
    parser = argparse.ArgumentParser(description="Measure one system; prints one line of JSON.")
    parser.add_argument("model", type=Path, help="what the system loads: a bundle, an exported folder, a GGUF file")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate after each prompt")
    parser.add_argument("--threads", type=int, required=True, help="CPUs the process may use")
    args = parser.parse_args()
    if min(args.prompts) < 1 or args.new_tokens < 2 or args.threads < 1:
        parser.error("prompts and threads must be at least 1, new tokens at least 2")
    return Job(args.model, tuple(args.prompts), args.new_tokens, args.threads)
