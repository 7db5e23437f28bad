"""Speed of a bundle on this machine for one request at a time, with the machine's limits for comparison."""

import logging
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmc import __version__
from llmc.bundle import read_bundle
from llmc.bundle.model.kinds import refuse
from llmc.errors import LlmcError, UsageError
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta
from llmc.runtime.generator import Generator
from llmc.runtime.host.cuda import open_driver
from llmc.runtime.host.huge_pages import settle
from llmc.runtime.host.machine import available_memory, cpu_model, resident_bytes
from llmc.runtime.loading import load
from llmc.runtime.sampling.params import SamplingParams

log = logging.getLogger(__name__)

BYTES_PER_THREAD = 256 << 20  # much larger than any cache
PASSES = 5


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """Seconds unless named otherwise; p50 and p95 over ``repeats`` prompts (TTFT) or all decode steps (TPOT)."""

    bundle: str
    model: str
    precision: str
    threads: int
    llmc_version: str
    engine: str
    engine_version: str
    python_version: str
    cpu: str
    prompt_length: int
    new_tokens: int
    repeats: int
    load_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # decode steps per second over the whole run, slow steps included
    rss_after_load_bytes: int
    rss_peak_bytes: int
    weight_bytes_per_token: int  # bytes of weights that one decode step reads
    # bytes per second read from memory in this run: by a plain loop on all threads, or by the decode steps if they were
    # faster. None for a bundle on a GPU.
    read_bandwidth: float | None = None
    # bytes per second that the GPU read and wrote while copying within its memory. None for a bundle on the CPU, or if
    # too little GPU memory was free.
    copy_bandwidth: float | None = None
    roofline_fraction: float | None  # the median decode step's bandwidth as a fraction of the bandwidth above


def benchmark(
    bundle: str | Path, *, prompt_length: int = 128, new_tokens: int = 64, repeats: int = 3, threads: int | None = None
) -> BenchmarkReport:
    """Load the bundle and time greedy answers to random prompts, one after the other.
    Raises UsageError: a length is out of range; BundleError, ResourceError: the bundle cannot be loaded."""
    folder = Path(bundle)
    manifest = read_bundle(folder)
    context = manifest.limits.max_context
    refuse(manifest.geometry, "timing")
    if prompt_length < 1 or new_tokens < 2 or repeats < 1 or prompt_length + new_tokens > context:
        raise UsageError(
            "prompt_length",
            f"is {prompt_length}, new_tokens {new_tokens} and repeats {repeats}, expected at least 1, 2 and 1, "
            f"and together at most the bundle's context of {context} tokens",
        )
    start = time.perf_counter()
    with load(folder, threads=threads, self_test=False) as model:
        load_s = time.perf_counter() - start
        rss = resident_bytes()[0]
        _time_request(model, prompt_length, 2, 0)  # warm-up: the first calls allocate
        settle()
        runs = [_time_request(model, prompt_length, new_tokens, index + 1) for index in range(repeats)]
        peak = resident_bytes()[1]  # before the bandwidth loop takes its own buffers
        manifest = model.manifest
        ttft, steps = np.array([first for first, _ in runs]), np.concatenate([rest for _, rest in runs])
        step, step_bytes = float(np.median(steps)), model.manifest.step_weight_bytes
        read = copied = None
        if manifest.device is None:
            read = max(read_bandwidth(model.threads), step_bytes / float(steps.min()))
        else:
            copied = copy_bandwidth()
        bandwidth = read or copied
        return BenchmarkReport(
            bundle=str(folder),
            model=manifest.source.name,
            precision=manifest.recipe.precision,
            threads=model.threads,
            llmc_version=__version__,
            engine=manifest.target.engine,
            engine_version=model.engine_version,
            python_version=platform.python_version(),
            cpu=cpu_model(),
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            repeats=repeats,
            load_s=load_s,
            ttft_p50_s=float(np.median(ttft)),
            ttft_p95_s=float(np.percentile(ttft, 95)),
            tpot_p50_s=step,
            tpot_p95_s=float(np.percentile(steps, 95)),
            prefill_tokens_per_s=prompt_length / float(np.median(ttft)),
            decode_tokens_per_s=len(steps) / float(steps.sum()),
            rss_after_load_bytes=rss,
            rss_peak_bytes=peak,
            weight_bytes_per_token=step_bytes,
            read_bandwidth=read,
            copy_bandwidth=copied,
            roofline_fraction=step_bytes / step / bandwidth if bandwidth else None,
        )


@dataclass
class Clock:
    """When a request was made and when each of its tokens came, in seconds of ``time.monotonic``."""

    made: float = field(default_factory=time.monotonic)
    tokens: list[float] = field(default_factory=list)

    def note(self, delta: Delta) -> None:
        """Record the time of new tokens; called on the engine's thread."""
        self.tokens += [time.monotonic()] * len(delta.token_ids)


def _time_request(model: Generator, prompt_length: int, new_tokens: int, index: int) -> tuple[float, list[float]]:
    prompt = draw_prompt(model.manifest.geometry.vocab_size, prompt_length, 0, index)
    params, clock = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True), Clock()
    model.submit(Request(prompt, params, on_delta=clock.note)).result()
    first, *steps = np.diff([clock.made, *clock.tokens]).tolist()
    return first, steps


def draw_prompt(vocab_size: int, length: int, seed: int, index: int) -> list[int]:
    """Draw tokens uniformly, so that prompts share no prefix worth caching."""
    tokens: list[int] = np.random.default_rng([seed, 1, index]).integers(0, vocab_size, length).tolist()
    return tokens


def copy_bandwidth() -> float | None:
    """Bytes per second that the GPU reads and writes while it copies; None, with a warning, if that fails."""
    try:
        with closing(open_driver()) as driver:
            return driver.copy_bandwidth()
    except LlmcError as error:  # keep the results measured so far
        log.warning("the GPU's copy bandwidth was not measured: %s", error)
        return None


def read_bandwidth(threads: int) -> float:
    """Bytes per second of the fastest of several passes in which every thread reads its own 256 MiB once.

    If memory is short, the buffers are smaller: together at most a quarter of the free memory.
    """
    size = min(BYTES_PER_THREAD, available_memory() // (4 * threads))
    arrays = [np.ones(size // 8, np.int64) for _ in range(threads)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            # max() is a vectorised reduction that releases the interpreter lock and has no long dependency chain.
            list(pool.map(np.max, arrays))
            seconds.append(time.perf_counter() - start)
    return threads * size / min(seconds)
