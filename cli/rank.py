"""``llmc rank``: a query and documents -> scores."""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmc.bundle import read_bundle
from llmc.cli.embed import instruction_option, truncate_option
from llmc.cli.options import SectionCommand, bundle_argument, debug_option, memory_option, threads_option
from llmc.cli.reading import stdin_limit, stdin_lines


@click.command("rank", cls=SectionCommand)
@bundle_argument
@click.argument("query")
@click.argument("documents", nargs=-1)
@instruction_option
@truncate_option
@threads_option
@memory_option
@debug_option
def rank_command(
    bundle: Path,
    query: str,
    documents: tuple[str, ...],
    instruction: str | None,
    truncate: bool,
    threads: int | None,
    memory: int | None,
) -> None:
    """Print DOCUMENTS by their score for QUERY, the best first, a JSON object on a line of its own for each; without
    DOCUMENTS the lines of stdin."""
    from llmc.runtime import load

    limit = stdin_limit(read_bundle(bundle).limits.max_context)
    with load(bundle, threads=threads, memory=memory) as model:
        given = list(documents) or list(stdin_lines(limit))
        scores = model.rank(query, given, instruction=instruction, truncate=truncate)
    for place in sorted(range(len(given)), key=lambda place: -scores[place]):
        line = {"score": float(str(scores[place])), "document": given[place]}
        click.echo(json.dumps(line, ensure_ascii=False))
