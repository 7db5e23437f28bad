"""``llmc bench``: the speed of a bundle on this machine, for one request at a time or under load.

That of a server, ``llmc bench serve``, is in bench_serve.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle, verify_files
from llmc.cli import output as show
from llmc.cli.options import (
    SectionCommand,
    SectionOption,
    bundle_argument,
    debug_option,
    determinism_option,
    draft_option,
    flag,
    json_option,
    threads_option,
    verify_option,
)
from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.runtime.bench.benchmark import BenchmarkReport
    from llmc.runtime.bench.load_test import LoadReport, Percentiles

REPEATS = 3


load_option = partial(click.option, cls=SectionOption, section="Under load (with --concurrency or --rate)")


class BenchCommand(SectionCommand):
    """``bench BUNDLE``, beside which ``bench serve URL`` is a command of its own; a folder may be ``./serve``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command that the first argument tells."""
        if args[:1] != ["serve"]:
            return super().make_context(info_name, args, parent, **extra)
        from llmc.cli.bench_serve import bench_serve_command

        return bench_serve_command.make_context(f"{info_name} serve", args[1:], parent, **extra)


@click.command("bench", cls=BenchCommand)
@bundle_argument
@click.option("--prompt-length", type=int, default=128, help="Tokens of the prompt.")
@click.option("--new-tokens", type=int, default=64, help="Tokens to generate.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help=f"Timed runs, after one that is not counted.  [default: {REPEATS}]",
)
@threads_option
@verify_option
@json_option
@debug_option
@load_option("--concurrency", type=int, help="Rows that run at once.  [default: the bundle's]")
@load_option("--rate", type=float, help="Requests per second that arrive.  [default: all arrive at once]")
@load_option("--max-queue", type=int, help="Requests that may wait; one more is rejected.  [default: 256]")
@load_option("--requests", type=int, help="How many arrive.  [default: 64]")
@load_option("--seed", type=int, help="Of the arrivals and the prompts.  [default: 0]")
@draft_option
@determinism_option
def bench_command(
    bundle: Path,
    prompt_length: int,
    new_tokens: int,
    repeats: int | None,
    threads: int | None,
    verify: bool | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Time prefill and decode of BUNDLE, beside what this machine's memory allows.

    One request follows the other. With --concurrency or --rate they arrive at random moments instead (a Poisson
    process) and wait for nobody: times count from the moment at which a request was due.

    llmc bench serve URL sends requests to a server instead, llmc's or any other with OpenAI's API.
    """
    load = {name: value for name, value in load.items() if value is not None}
    common: dict[str, Any] = {"prompt_length": prompt_length, "new_tokens": new_tokens, "threads": threads}
    report: LoadReport | BenchmarkReport
    if verify:
        with show.progress() as progress:
            for name in verify_files(bundle, read_bundle(bundle)):
                progress(f"hashed {name}")
    if "concurrency" in load or "rate" in load:
        from llmc.runtime.bench.load_test import load_test

        if repeats is not None:
            raise UsageError("repeats is for one sequence; under load, say --requests")
        report = load_test(bundle, **common, **load)
        rows = load_rows(report)
    else:
        from llmc.runtime.bench.benchmark import benchmark

        if load:
            raise UsageError(f"{flag(next(iter(load)))} is for the engine under load: give --concurrency or --rate too")
        report = benchmark(bundle, repeats=REPEATS if repeats is None else repeats, **common)
        rows = benchmark_rows(report)
    if as_json:
        show.print_json(report)
    else:
        show.print_rows([*head_rows(report), *rows])


def head_rows(report: BenchmarkReport | LoadReport) -> list[tuple[str, str]]:
    """The bundle, the machine, the versions."""
    engine = f"{report.engine} {report.engine_version}"
    return [
        ("bundle", f"{report.bundle} ({report.model}, {report.precision})"),
        ("machine", f"{report.cpu}, {report.threads} threads"),
        ("versions", f"llmc {report.llmc_version}, {engine}, Python {report.python_version}"),
    ]


def benchmark_rows(report: BenchmarkReport) -> list[tuple[str, str]]:
    """Latencies, speeds, memory, and how close decoding comes to reading the weights as fast as memory can."""
    return [
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


def load_rows(report: LoadReport) -> list[tuple[str, str]]:
    """Arrivals, what became of them, latencies and throughput."""
    at = "all at once" if report.rate is None else f"{report.rate:g} per second, seed {report.arrival_seed}"
    arrived = "" if report.arrived_rate is None else f", which gave {report.arrived_rate:.2f} per second"
    full = " by a full queue" if report.rejected else ""
    ended = f"{report.completed} completed, {report.rejected} rejected{full}, {report.failed} failed"
    draft = "" if report.draft is None else f", draft {report.draft}"
    rows = [
        (
            "engine",
            f"{report.concurrency} rows, a queue of {report.max_queue}, determinism {report.determinism}{draft}",
        ),
        ("requests", f"{report.requests} x ({report.prompt_length} prompt + {report.new_tokens} new tokens)"),
        ("arrivals", at + arrived),
        ("load", f"{report.load_s:.2f} s"),
        ("outcome", ended if report.failure is None else f"{ended}: {report.failure}"),
        ("throughput", f"{report.output_tokens_per_s:.1f} new tok/s, {report.total_tokens_per_s:.1f} with prompts"),
        ("achieved rate", f"{report.achieved_rate:.2f} per second, for {report.duration_s:.1f} s"),
        *([("latencies", f"of the {report.completed} that completed")] if report.completed < report.requests else []),
        ("time to first token", percentiles(report.ttft)),
        ("time per token", percentiles(report.tpot)),
        ("inter-token latency", percentiles(report.itl)),
        ("end to end", percentiles(report.e2e)),
        ("queue", percentiles(report.queue)),
        ("memory", f"{show.size(report.rss_peak_bytes)} peak"),
    ]
    if report.draft_acceptance is not None:
        rows.append(("drafts accepted", f"{report.draft_acceptance:.0%}"))
    return rows


def percentiles(seconds: Percentiles) -> str:
    """The three of them."""
    values = {"p50": seconds.p50_s, "p95": seconds.p95_s, "p99": seconds.p99_s}
    return ", ".join(f"{milliseconds(value)} {name}" for name, value in values.items())


def milliseconds(seconds: float) -> str:
    """Two digits after the point: 0.0123 -> 12.30 ms."""
    return f"{seconds * 1000:.2f} ms"
