"""``llmc bench``: how fast a bundle is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.cli import output as show
from llmc.cli.options import bundle_argument, debug_option, json_option, threads_option

if TYPE_CHECKING:
    from llmc.runtime.benchmark import BenchmarkReport


@click.command("bench")
@bundle_argument
@click.option("--prompt-length", type=int, default=128, help="Tokens of the prompt.")
@click.option("--new-tokens", type=int, default=64, help="Tokens to generate.")
@click.option("--repeats", type=int, default=3, help="Timed runs, after one that is not counted.")
@threads_option
@json_option
@debug_option
def bench_command(
    bundle: Path, prompt_length: int, new_tokens: int, repeats: int, threads: int | None, as_json: bool
) -> None:
    """Time prefill and decode of BUNDLE, beside what this machine's memory allows."""
    from llmc.runtime.benchmark import benchmark

    report = benchmark(bundle, prompt_length=prompt_length, new_tokens=new_tokens, repeats=repeats, threads=threads)
    if as_json:
        show.print_json(report)
    else:
        print_report(report)


def print_report(report: BenchmarkReport) -> None:
    """Latencies, speeds, memory, and how close decoding comes to reading the weights as fast as memory can."""
    engine = f"{report.engine} {report.engine_version}"
    show.print_rows(
        [
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
            ("memory bandwidth", f"{show.size(round(report.read_bandwidth))}/s"),
            ("of that, decoding uses", f"{report.roofline_fraction:.0%}"),
        ]
    )


def milliseconds(seconds: float) -> str:
    """Two digits after the point: 0.0123 -> 12.30 ms."""
    return f"{seconds * 1000:.2f} ms"
