"""``llmc bench serve``: load on any OpenAI-compatible server, and how it bears it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli import output as show
from llmc.cli.options import EXISTING_FILE, NEW_FILE, SectionCommand, SectionOption, debug_option, json_option
from llmc.errors import UsageError, printable, require

if TYPE_CHECKING:
    from llmc.runtime.bench.serve_report import Point, ServeReport

prompt_option = partial(click.option, cls=SectionOption, section="Prompts and answers")
server_option = partial(click.option, cls=SectionOption, section="The server")


def numbers(kind: type[int] | type[float]) -> Callable[..., tuple[float, ...] | None]:
    """The callback that reads numbers with commas between them."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
        try:
            return None if text is None else tuple(kind(part) for part in text.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is no list of numbers, expected for example 1,4,8") from error

    return read


rate_help = "Requests per second; several, as 1,2,4, give a test each."
concurrency_help = "Clients that wait for their answers; one number or several.  [default: 1]"


@click.command("serve", cls=SectionCommand)
@click.argument("url")
@click.option("--rate", metavar="N,...", callback=numbers(float), help=rate_help)
@click.option("--even", is_flag=True, help="Equal gaps between arrivals.  [default: a Poisson process]")
@click.option("--concurrency", metavar="N,...", callback=numbers(int), help=concurrency_help)
@click.option("--requests", type=int, help="Of each test.  [default: 64, or what comes in the duration]")
@click.option("--duration", type=float, help="Seconds of each test in which requests are sent.")
@click.option("--warm-up", type=int, help="Requests before, which do not count.  [default: 2]")
@click.option("--seed", type=int, help="Of arrivals and prompts.  [default: 0]")
@click.option("--slo", help="Goodput: seconds, as ttft=0.5,tpot=0.05,e2e=10.")
@click.option("--plot", type=NEW_FILE, help="Draw distributions and timelines into this PNG file.")
@json_option
@debug_option
@prompt_option("--prompts", type=EXISTING_FILE, help="A prompt in each line; of .jsonl a list of messages.")
@prompt_option("--prompt-length", help="Tokens of drawn prompts, as 128 or 128-512.  [default: 128]")
@prompt_option("--shared-prefix", type=float, help="Share of a drawn prompt that all have in common.  [default: 0]")
@prompt_option("--max-tokens", help="Tokens of answers, as 64 or 16-128.  [default: 64]")
@prompt_option("--ignore-eos", is_flag=True, help="Exactly so many; not every server takes this field.")
@prompt_option("--no-usage", is_flag=True, help="Do not ask for token counts; pieces of the stream are counted.")
@prompt_option("--extra-body", help="More fields of the request, as JSON, or @FILE.")
@server_option("--api", type=click.Choice(["chat", "completions"]), help="Which of its APIs.  [default: chat]")
@server_option("--model", help="Name of the model.  [default: the first that the server lists]")
@server_option("--api-key-env", metavar="NAME", help="Environment variable with the API key.")
@server_option("--api-key-file", type=EXISTING_FILE, help="File with the API key.")
@server_option("--ca-file", type=EXISTING_FILE, help="Certificates to trust, PEM.  [default: the system's]")
@server_option("--timeout", type=float, help="Seconds for a request.  [default: 600]")
def bench_serve_command(
    url: str,
    plot: Path | None,
    as_json: bool,
    api_key_env: str | None,
    api_key_file: Path | None,
    extra_body: str | None,
    no_usage: bool,
    **options: Any,
) -> None:
    """Send requests to the OpenAI-compatible server at URL, and time its streams.

    At a rate, requests come whether or not the server keeps pace. At a concurrency, so many clients each send the next
    when they have their answer. A server that is not yours may charge for it, or take it for an attack.
    """
    require("httptools", "serve")
    if plot is not None:
        require("matplotlib", "plot")
    from llmc.runtime.bench.serve_load import LoadSettings, serve_load

    given = {name: value for name, value in options.items() if value is not None}
    settings = LoadSettings(url=url, usage=not no_usage, extra_body=read_body(extra_body), **given)
    with show.progress() as progress:
        report, timelines = serve_load(settings, read_key(api_key_env, api_key_file), progress)
    if plot is not None:
        from llmc.runtime.bench.serve_plot import draw

        draw(plot, report, timelines)
    if as_json:
        show.print_json(report)
    else:
        print_report(report)
        if plot is not None:
            click.echo(f"wrote {plot}")
    if not any(point.completed for point in report.points):
        click.get_current_context().exit(1)


def read_body(text: str | None) -> dict[str, Any]:
    """The extra fields of a body.

    Raises:
        UsageError: they are no JSON object, or the file cannot be read.
    """
    if text is None:
        return {}
    try:
        found = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--extra-body: {error}; expected JSON, as '{{\"temperature\": 0}}', or @FILE") from error
    if not isinstance(found, dict):
        raise UsageError(f"--extra-body is {text!r}, expected a JSON object, as '{{\"temperature\": 0}}'")
    return found


def read_key(variable: str | None, file: Path | None) -> str | None:
    """The API key, if one was named.

    Raises:
        UsageError: two were, or the variable is not set, or the file cannot be read.
    """
    if variable is not None and file is not None:
        raise UsageError("--api-key-env and --api-key-file contradict each other: give one of them")
    if variable is not None and variable not in os.environ:
        raise UsageError(f"--api-key-env: {variable} is not set; export it first")
    try:
        return file.read_text(encoding="utf-8").strip() if file else os.environ[variable] if variable else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file: {file}: {error}") from error


def print_report(report: ServeReport) -> None:
    """The head, a row for each figure with a column for each point, and what is to be said of them."""
    show.print_rows([("server", f"{report.server}, model {report.model}"), ("client", client_words(report))])
    click.echo()
    show.print_table(*outcomes(report.points), numbers=True)
    click.echo()
    show.print_table(*latencies(report.points), numbers=True)
    for point in report.points:
        for note in notes(point):
            click.echo(f"{name_of(point)}: {printable(note)}")


def client_words(report: ServeReport) -> str:
    """The machine and the versions."""
    client = report.client
    return f"{client['cpu']}, {client['threads']} threads; llmc {client['llmc']}, Python {client['python']}"


def name_of(point: Point) -> str:
    """The head of a point's column."""
    return f"rate {point.rate:g}" if point.rate is not None else f"concurrency {point.concurrency}"


def outcomes(points: Sequence[Point]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the first table: of each point what became of its requests."""
    head = ("", "answered", "failed", "most at once", "arrivals/s", "answers/s", "tok/s", "prompt", "output")
    rows: list[Sequence[str]] = []
    for point in points:
        rates = (number(point.arrived_rate, ".2f"), f"{point.requests_per_s:.2f}", f"{point.output_tokens_per_s:.1f}")
        tokens = [number(found.mean if found else None, ".1f") for found in (point.prompt_tokens, point.output_tokens)]
        row = [name_of(point), str(point.completed), str(point.failed), str(point.most_in_flight), *rates, *tokens]
        good = point.goodput
        rows.append(row if good is None else [*row, f"{good.requests_per_s:.2f} ({good.share:.0%})"])
    return (*head, "goodput/s") if points[0].goodput is not None else head, rows


def latencies(points: Sequence[Point]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the second table: mean and percentiles in milliseconds."""
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    rows: list[Sequence[str]] = []
    for point in points:
        times = {"TTFT": point.ttft, "TPOT": point.tpot, "ITL": point.itl, "E2E": point.e2e}
        if point.rate is not None:  # else a request is due when it is sent
            times |= {"TTFT from when due": point.ttft_from_due, "E2E from when due": point.e2e_from_due}
        for name, found in times.items():
            cells = ["-" if found is None else f"{getattr(found, each) * 1e3:.2f}" for each in names]
            rows.append((name if len(points) == 1 else f"{name_of(point)}: {name}", *cells))
    return ("milliseconds", *names), rows


def number(value: float | None, form: str) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else format(value, form)


def notes(point: Point) -> list[str]:
    """Sentences about a point: failures, a client that was late, numbers that are not tokens."""
    found = [f"{each.count} x {kind}: {each.first}" for kind, each in point.errors.items()]
    if point.behind and point.client_delay is not None:
        late = f"{point.client_delay.p99 * 1e3:.1f} ms late at p99 and took {point.client_cpu:.0%} of a CPU"
        found.append(f"the client could not keep pace ({late}): in part these figures are its own")
    if point.completed and point.counted_by != "usage":
        found.append("the server did not count every output's tokens, so pieces of the stream count as tokens")
    return found
