"""``llmc list`` and ``llmc rm``: the bundles that were built on first use."""

from datetime import datetime

import click

from llmc.cli import output as show
from llmc.cli.options import debug_option, json_option


@click.command("list", short_help="List the bundles that were built on first use.")
@json_option
@debug_option
def list_command(as_json: bool) -> None:
    """List the bundles that were built on first use, in ~/.cache/llmc/bundles or below LLMC_CACHE."""
    from llmc.sources.shelf import list_bundles

    bundles = list_bundles()
    if as_json:
        show.print_json(bundles)
        return
    rows = [
        (
            bundle.name,
            bundle.precision or "unknown",
            show.size(bundle.size),
            "" if bundle.mean_kl is None else f"{bundle.mean_kl:.5f}",
            f"{datetime.fromtimestamp(bundle.used):%Y-%m-%d %H:%M}",
        )
        for bundle in bundles
    ]
    show.print_table(("name", "precision", "size", "KL", "last use"), rows)


@click.command("rm", short_help="Remove bundles that llmc list shows.")
@click.argument("names", nargs=-1, required=True)
@debug_option
def rm_command(names: tuple[str, ...]) -> None:
    """Remove the bundles NAMES from the cache. Processes that run them go on."""
    from llmc.sources.shelf import remove_bundle

    for name in names:
        click.echo(f"removed {remove_bundle(name)}")
