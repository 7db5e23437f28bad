"""``llmc bench serve``: load on any OpenAI-compatible server, and how it bears it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click

from llmc.cli import output as show
from llmc.cli.options import SectionCommand, SectionOption, debug_option, json_option
from llmc.errors import UsageError, printable

prompt_option = partial(click.option, cls=SectionOption, section="Prompts and answers")
server_option = partial(click.option, cls=SectionOption, section="The server")
SECONDS, REQUESTS = click.FloatRange(0.001), click.IntRange(1, 1_000_000)
QUANTITIES = ("mean", "p50", "p90", "p95", "p99", "max")


def numbers(kind: type[int] | type[float], most: float) -> Callable[..., tuple[float, ...]]:
    """The callback that reads numbers above 0 with commas between them."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...]:
        try:
            found = tuple(kind(part) for part in text.split(",")) if text is not None else ()
        except ValueError:
            found = (0,)
        if not all(0 < number <= most for number in found):
            raise click.BadParameter(f"{text!r} is no list of numbers from above 0 to {most:,}, as 1,4,8")
        return found

    return read


rate_help = "Requests per second, a Poisson process; several, as 1,2,4, give a test each."
concurrency_help = "Clients that wait for their answers; one number or several.  [default: 1]"


@click.command("serve", cls=SectionCommand)
@click.argument("url")
@click.option("--rate", metavar="N,...", callback=numbers(float, 1_000_000), help=rate_help)
@click.option("--concurrency", metavar="N,...", callback=numbers(int, 1024), help=concurrency_help)
@click.option("--requests", type=REQUESTS, help="Of each test.  [default: 64, or what comes in the duration]")
@click.option("--duration", type=SECONDS, help="Seconds of each test in which requests are sent.")
@click.option("--warm-up", type=click.IntRange(0), help="Requests before, which do not count.  [default: 2]")
@click.option("--seed", type=click.IntRange(0), help="Of arrivals and prompts.  [default: 0]")
@json_option
@debug_option
@prompt_option("--prompt-length", help="Tokens of the prompts, as 128 or 128-512.  [default: 128]")
@prompt_option("--max-tokens", help="Tokens of answers, as 64 or 16-128.  [default: 64]")
@prompt_option("--ignore-eos", is_flag=True, help="Exactly so many; not every server takes this field.")
@prompt_option("--extra-body", default="{}", help="More fields of the request, as JSON.")
@server_option("--model", help="Name of the model.  [default: the first that the server lists]")
@server_option("--api-key-env", metavar="NAME", help="Environment variable with the API key.")
@server_option("--timeout", type=SECONDS, help="Seconds for a request.  [default: 600]")
def bench_serve_command(url: str, as_json: bool, api_key_env: str | None, extra_body: str, **options: Any) -> None:
    """Send requests to the OpenAI-compatible server at URL, and time its streams.

    At a rate, requests come whether or not the server keeps pace. At a concurrency, so many clients each send the next
    when they have their answer. A server that is not yours may charge for it, or take it for an attack.
    """
    from llmc.runtime.bench.serve_load import LoadSettings, serve_load

    if api_key_env is not None and api_key_env not in os.environ:
        raise UsageError(f"--api-key-env: {api_key_env} is not set; export it first")
    given = {name: value for name, value in options.items() if value is not None}
    settings = LoadSettings(url=url, extra_body=read_object(extra_body), **given)
    with show.progress() as progress:
        report = serve_load(settings, os.environ[api_key_env] if api_key_env else None, progress)
    if as_json:
        show.print_json(report)
    else:
        print_report(report)
    if not any(point["completed"] for point in report["points"]):
        click.get_current_context().exit(1)


def read_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"--extra-body is {text!r}, expected a JSON object, as '{{\"temperature\": 0}}'")
    return found


def print_report(report: Mapping[str, Any]) -> None:
    """Print what was asked, a row of latencies for each test, and sentences about each."""
    client = report["client"]
    machine = f"{client['cpu']}, {client['threads']} threads; llmc {client['llmc']}, Python {client['python']}"
    show.print_rows([("server", f"{report['server']}, model {report['model']}"), ("client", machine)])
    click.echo()
    rows = [row for point in report["points"] for row in latencies(point)]
    show.print_table(("milliseconds", *QUANTITIES), rows, numbers=True)
    for point in report["points"]:
        for note in notes(point):
            click.echo(f"{name_of(point)}: {printable(note)}")


def name_of(point: Mapping[str, Any]) -> str:
    return f"rate {point['rate']:g}" if point["rate"] is not None else f"concurrency {point['concurrency']}"


def latencies(point: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Cells of the latencies of a test; at a rate, TTFT and E2E also count from when a request was due."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
    if point["rate"] is not None:
        names |= {"ttft_from_due": "TTFT from when due", "e2e_from_due": "E2E from when due"}
    for key, name in names.items():
        found = point[key]
        yield f"{name_of(point)}: {name}", *("-" if found is None else f"{found[q] * 1e3:.2f}" for q in QUANTITIES)


def notes(point: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about a test: the requests, speeds, failures, a client that was late, numbers that are not tokens."""
    yield f"{point['completed']} answered, {point['failed']} failed, in {point['duration_s']:.1f} s"
    if point["completed"]:
        sizes = [point[key]["mean"] if point[key] else 0 for key in ("prompt_tokens", "output_tokens")]
        speeds = f"{point['requests_per_s']:.2f} answers/s, {point['output_tokens_per_s']:.1f} tok/s"
        yield f"{speeds}; in the mean {sizes[0]:.1f} tokens of prompt and {sizes[1]:.1f} of output"
    for kind, each in point["errors"].items():
        yield f"{each['count']} x {kind}: {each['first']}"
    if point["behind"]:
        late = f"{point['client_delay']['p99'] * 1e3:.1f} ms late at p99 and took {point['client_cpu']:.0%} of a CPU"
        yield f"the client could not keep pace ({late}): in part these figures are its own"
    if point["counted_by"] != "usage":
        yield "the server did not count every output's tokens, so pieces of the stream count as tokens"
