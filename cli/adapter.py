"""``llmc adapter``: LoRA adapters for a bundle."""

from pathlib import Path

import click

from llmc.cli.options import bundle_argument, debug_option, source_path
from llmc.errors import require


@click.group("adapter", short_help="Add adapters that a bundle loads beside its model.")
def adapter_command() -> None:
    """Adapters that a bundle loads beside its model."""


@adapter_command.command("add")
@bundle_argument
@click.argument("folder", type=source_path)
@click.option("--name", required=True, help="Name that requests give.")
@debug_option
def add_command(bundle: Path, folder: Path, name: str) -> None:
    """Write a LoRA adapter of PEFT into BUNDLE, which was built with --adapters."""
    require("onnx_ir", "export")
    from llmc.export.adapters import add_adapter

    target, notes = add_adapter(bundle, folder, name)
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"wrote {target}")
