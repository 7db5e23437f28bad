"""``llmc adapter``: LoRA adapters for a bundle."""

import click

from llmc.cli.options import debug_option, source_argument, take_path
from llmc.errors import require
from llmc.sources import Kind, Located


@click.group("adapter", short_help="Add adapters that a bundle loads beside its model.")
def adapter_command() -> None:
    """Adapters that a bundle loads beside its model."""


@adapter_command.command("add")
@source_argument("bundle", also=("folder",))
@click.argument("folder")
@click.option("--name", required=True, help="Name that requests give.")
@debug_option
def add_command(bundle: Located, folder: Located, name: str) -> None:
    """Write a LoRA adapter of PEFT into BUNDLE, which was built with --adapters."""
    path = take_path(bundle, Kind.BUNDLE, advice="build one with --adapters")
    require("onnx_ir", "export")
    from llmc.export.adapters import add_adapter

    target, notes = add_adapter(path, folder.path, name)
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"wrote {target}")
