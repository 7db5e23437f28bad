"""``llmc embed``: texts -> vectors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmc.bundle import read_bundle
from llmc.cli.options import SectionCommand, bundle_argument, debug_option, memory_option, threads_option
from llmc.cli.reading import stdin_limit, stdin_lines

instruction_option = click.option(
    "--instruction", help="Name of one of the checkpoint's prompts, a task in words, or a prompt that ends in a colon."
)
truncate_option = click.option("--truncate", is_flag=True, help="Cut what is too long, instead of refusing it.")


@click.command("embed", cls=SectionCommand)
@bundle_argument
@click.argument("texts", nargs=-1)
@click.option("--dimensions", type=int, help="The first so many values of each vector.  [default: all]")
@instruction_option
@truncate_option
@threads_option
@memory_option
@debug_option
def embed_command(
    bundle: Path,
    texts: tuple[str, ...],
    dimensions: int | None,
    instruction: str | None,
    truncate: bool,
    threads: int | None,
    memory: int | None,
) -> None:
    """Print the vector of each of TEXTS, a JSON list on a line of its own; without TEXTS of each line of stdin."""
    from llmc.runtime import load

    limit = stdin_limit(read_bundle(bundle).limits.max_context)
    with load(bundle, threads=threads, memory=memory) as model:
        given = list(texts) or list(stdin_lines(limit))
        for vector in model.embed(given, dimensions=dimensions, instruction=instruction, truncate=truncate):
            click.echo(json.dumps([float(str(value)) for value in vector]))
