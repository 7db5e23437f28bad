"""How fast a bundle is on this machine, with what it takes to judge the figures."""

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc import __version__
from llmc.bundle import read_bundle
from llmc.errors import UsageError
from llmc.runtime.bench.roofline import read_bandwidth
from llmc.runtime.host.energy import EnergyMeter, Joules
from llmc.runtime.host.machine import cpu_model, resident_bytes
from llmc.runtime.model import Model, load


@dataclass(frozen=True)
class BenchmarkReport:
    """Seconds unless named otherwise; p50 and p95 over ``repeats`` prompts (TTFT) or all decode steps (TPOT).

    Attributes:
        decode_tokens_per_s: all decode steps over their time; slow ones count.
        weight_bytes_per_token: weights that one decode step reads.
        read_bandwidth: bytes per second that this machine read from memory in this run: a plain loop on all threads, or
            the decode steps themselves where they were faster.
        roofline_fraction: share of that bandwidth which the median decode step reached.
        energy_joules: of the timed runs; None where the machine exposes no energy (:mod:`llmc.runtime.host.energy`).
        joules_per_token: that, prefill included, by generated token.
        energy_source: what it was read from, as ``rapl`` or ``rapl+nvml``.
    """

    bundle: str
    model: str
    precision: str
    prompt_length: int
    new_tokens: int
    repeats: int
    threads: int
    load_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    rss_after_load_bytes: int
    rss_peak_bytes: int
    weight_bytes_per_token: int
    read_bandwidth: float
    roofline_fraction: float
    energy_joules: float | None
    joules_per_token: float | None
    energy_source: str | None
    llmc_version: str
    engine: str
    engine_version: str
    python_version: str
    cpu: str


def benchmark(
    bundle: str | Path, *, prompt_length: int = 128, new_tokens: int = 64, repeats: int = 3, threads: int | None = None
) -> BenchmarkReport:
    """Load the bundle and time greedy generation from prompts of arbitrary tokens.

    Raises:
        UsageError: a length is out of range.
        BundleError, ResourceError: the bundle cannot be loaded.
    """
    folder = Path(bundle)
    context = read_bundle(folder).limits.max_context
    if prompt_length < 1 or new_tokens < 2 or repeats < 1 or prompt_length + new_tokens > context:
        raise UsageError(
            f"prompt_length {prompt_length}, new_tokens {new_tokens}, repeats {repeats}: expected at least 1, 2 and 1, "
            f"and together at most the bundle's context of {context} tokens"
        )
    start = time.perf_counter()
    with load(folder, threads=threads, self_test=False) as model:
        load_s = time.perf_counter() - start
        rss = resident_bytes()[0]
        _time_request(model, prompt_length, 2)  # the first call allocates; it is not counted
        with EnergyMeter() as meter:
            runs = [_time_request(model, prompt_length, new_tokens) for _ in range(repeats)]
        return _report(model, runs, load_s, rss, prompt_length, new_tokens, meter.joules)


def _time_request(model: Model, prompt_length: int, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds of the prefill and of each decode step."""
    vocab = model.manifest.geometry.vocab_size
    prompt = (np.arange(prompt_length) + 10) % vocab
    marks = [time.perf_counter()]
    logits = model.runner.prefill(prompt.tolist())
    for position in range(prompt_length, prompt_length + new_tokens):
        token = int(logits[0, -1].argmax())
        marks.append(time.perf_counter())
        if position < prompt_length + new_tokens - 1:
            logits = model.runner.step(token, position)
    steps = np.diff(marks).tolist()
    return steps[0], steps[1:]


def energy(joules: Joules | None, new_tokens: int) -> dict[str, Any]:
    """The fields of a report about energy, None where there is nothing to report."""
    return {
        "energy_joules": None if joules is None else joules.total,
        "joules_per_token": None if joules is None or not new_tokens else joules.total / new_tokens,
        "energy_source": None if joules is None else "+".join(joules.sources),
    }


def _report(
    model: Model,
    runs: list[tuple[float, list[float]]],
    load_s: float,
    rss: int,
    prompt_length: int,
    new_tokens: int,
    joules: Joules | None,
) -> BenchmarkReport:
    manifest = model.manifest
    ttft = np.array([first for first, _ in runs])
    steps = np.concatenate([rest for _, rest in runs])
    step = float(np.median(steps))
    step_bytes = manifest.graphs["decode"].step_weight_bytes
    peak = resident_bytes()[1]  # before the bandwidth loop takes its own buffers
    bandwidth = max(read_bandwidth(model.threads), step_bytes / float(steps.min()))
    return BenchmarkReport(
        bundle=str(model.folder),
        model=manifest.source.name,
        precision=manifest.recipe.precision,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        repeats=len(runs),
        threads=model.threads,
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
        read_bandwidth=bandwidth,
        roofline_fraction=step_bytes / step / bandwidth,
        **energy(joules, len(runs) * new_tokens),
        llmc_version=__version__,
        engine=manifest.target.engine,
        engine_version=model.engine_version,
        python_version=platform.python_version(),
        cpu=cpu_model(),
    )
