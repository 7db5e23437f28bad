"""``llmc bench``: the speed of a bundle on this machine, for one request at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle, verify_files
from llmc.cli import output as show
from llmc.cli.options import SectionCommand, bundle_argument, debug_option, json_option, threads_option, verify_option

if TYPE_CHECKING:
    from llmc.runtime.bench.benchmark import BenchmarkReport


@click.command("bench", short_help="Time prefill and decode of BUNDLE.", cls=SectionCommand)
@bundle_argument
@click.option("--prompt-length", type=int, default=128, help="Tokens of the prompt.")
@click.option("--new-tokens", type=int, default=64, help="Tokens to generate.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Timed runs, after one that is not counted.")
@threads_option
@verify_option
@json_option
@debug_option
def bench_command(bundle: Path, verify: bool | None, as_json: bool, **options: Any) -> None:
    """Time prefill and decode of BUNDLE, beside what this machine's memory allows.

    One request follows the other.
    """
    if verify:
        with show.progress() as progress:
            for name in verify_files(bundle, read_bundle(bundle)):
                progress(f"hashed {name}")
    from llmc.runtime.bench.benchmark import benchmark

    report = benchmark(bundle, **options)
    if as_json:
        show.print_json(report)
    else:
        show.print_rows(benchmark_rows(report))


def benchmark_rows(report: BenchmarkReport) -> list[tuple[str, str]]:
    """Latencies, speeds, memory, and how close decoding comes to the memory's bandwidth."""
    engine = f"{report.engine} {report.engine_version}"
    return [
        ("bundle", f"{report.bundle} ({report.model}, {report.precision})"),
        ("machine", f"{report.cpu}, {report.threads} threads"),
        ("versions", f"llmc {report.llmc_version}, {engine}, Python {report.python_version}"),
        ("runs", f"{report.repeats} x ({report.prompt_length} prompt + {report.new_tokens} new tokens)"),
        ("load", f"{report.load_s:.2f} s"),
        ("time to first token", f"{milliseconds(report.ttft_p50_s)} p50, {milliseconds(report.ttft_p95_s)} p95"),
        ("time per token", f"{milliseconds(report.tpot_p50_s)} p50, {milliseconds(report.tpot_p95_s)} p95"),
        ("prefill", f"{report.prefill_tokens_per_s:.1f} tok/s"),
        ("decode", f"{report.decode_tokens_per_s:.1f} tok/s"),
        ("memory", f"{show.size(report.rss_after_load_bytes)} loaded, {show.size(report.rss_peak_bytes)} peak"),
        ("weights per token", show.size(report.weight_bytes_per_token)),
        *bandwidth_rows(report),
    ]


def bandwidth_rows(report: BenchmarkReport) -> list[tuple[str, str]]:
    """The bandwidth of the memory that holds the weights, and decoding's share of it."""
    bandwidth = report.read_bandwidth or report.copy_bandwidth
    name = "memory bandwidth" if report.read_bandwidth else "GPU copy bandwidth"
    if bandwidth is None or report.roofline_fraction is None:
        return [(name, "not measured")]
    return [(name, f"{show.size(round(bandwidth))}/s"), ("of that, decoding uses", f"{report.roofline_fraction:.0%}")]


def milliseconds(seconds: float) -> str:
    """Milliseconds with two decimal places: 0.0123 -> 12.30 ms."""
    return f"{seconds * 1000:.2f} ms"
