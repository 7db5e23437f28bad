"""``llmc embed`` and ``llmc rank``: texts -> vectors; a query and documents -> scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llmc.bundle import read_bundle
from llmc.cli.options import SectionCommand, add_options, bundle_argument, debug_option, memory_option, threads_option
from llmc.cli.reading import stdin_limit, stdin_lines
from llmc.strict import escape_line_ends

encoding_options = add_options(
    [
        click.option(
            "--instruction",
            help="Name of one of the checkpoint's prompts, a task in words, or a prompt that ends in a colon.",
        ),
        click.option("--truncate", is_flag=True, help="Cut what is too long, instead of refusing it."),
        threads_option,
        memory_option,
        debug_option,
    ]
)


def read_texts(texts: tuple[str, ...], bundle: Path) -> list[str]:
    """The arguments, or else the lines of stdin."""
    return list(texts) or list(stdin_lines(stdin_limit(read_bundle(bundle).limits.max_context)))


@click.command("embed", short_help="Print the vector of each of TEXTS.", cls=SectionCommand)
@bundle_argument
@click.argument("texts", nargs=-1)
@click.option("--dimensions", type=int, help="The first so many values of each vector.  [default: all]")
@encoding_options
def embed_command(
    bundle: Path, texts: tuple[str, ...], threads: int | None, memory: int | None, **options: Any
) -> None:
    """Print the vector of each of TEXTS, a JSON list on a line of its own; without TEXTS of each line of stdin."""
    from llmc.runtime import Embedder, load

    with load(bundle, kind=Embedder, threads=threads, memory=memory) as model:
        for vector in model.embed(read_texts(texts, bundle), **options):
            click.echo(json.dumps([float(str(value)) for value in vector]))


@click.command("rank", short_help="Print DOCUMENTS by their score for QUERY, the best first.", cls=SectionCommand)
@bundle_argument
@click.argument("query")
@click.argument("documents", nargs=-1)
@encoding_options
def rank_command(
    bundle: Path, query: str, documents: tuple[str, ...], threads: int | None, memory: int | None, **options: Any
) -> None:
    """Print DOCUMENTS (default: the lines of stdin) by their score for QUERY, best first, as one JSON object a line."""
    from llmc.runtime import Embedder, load

    with load(bundle, kind=Embedder, threads=threads, memory=memory) as model:
        candidates = read_texts(documents, bundle)
        scores = model.rank(query, candidates, **options)
    for index in sorted(range(len(candidates)), key=lambda index: -scores[index]):
        line = {"score": float(str(scores[index])), "document": candidates[index]}
        click.echo(escape_line_ends(json.dumps(line, ensure_ascii=False)))
