"""``llmc export``: checkpoint -> portable graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.cli import output as show
from llmc.cli.inspect import source_rows
from llmc.cli.options import debug_option, force_option, json_option, output_option, source_argument, take_path
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import printable
from llmc.sources import Kind, Located

if TYPE_CHECKING:
    from llmc.export import ExportReport


@click.command("export", short_help="Export CHECKPOINT, or a GGUF file, as portable ONNX.")
@source_argument("checkpoint", also=("of",))
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="FOLDER[:SCALE]",
    help="Add a LoRA or DoRA adapter, a folder of PEFT or a GGUF file, to the weights, SCALE times (1). Repeatable.",
)
@click.option("--text-only", is_flag=True, help="Leave the part that sees or hears out.")
@click.option(
    "--of",
    metavar="MODEL",
    help="Export the draft head of CHECKPOINT, an EAGLE-3 folder, a Gemma 4 assistant or MODEL itself (Qwen3.5), for "
    "the checkpoint MODEL.",
)
@click.option("--copy", is_flag=True, help="Copy the weights instead of linking to the checkpoint's files.")
@output_option
@force_option
@json_option
@debug_option
def export_command(
    checkpoint: Located,
    output: Path,
    force: bool,
    as_json: bool,
    adapters: tuple[str, ...],
    text_only: bool,
    of: Located | None,
    copy: bool,
) -> None:
    """Export CHECKPOINT, a Hugging Face folder, a GGUF file or a name at the hub, as a portable ONNX decoder.

    The weights stay where they are on disk: the output folder holds links to the checkpoint's files, or copies of
    them on another file system. Give the first of several GGUF files.
    """
    from llmc.export import export
    from llmc.sources.built import check_export

    path = take_path(checkpoint, Kind.CHECKPOINT, Kind.GGUF, Kind.ADAPTER, advice="give what it was made from")
    check_export(of.path if of else path, text_only)  # a head is smaller than its model
    with cleanly_stopped(), show.progress() as progress:
        report = export(
            path,
            output,
            adapters=[split_adapter(adapter) for adapter in adapters],
            text_only=text_only,
            of=of.path if of else None,
            copy=copy,
            force=force,
            progress=progress,
        )
    if as_json:
        show.print_json(report)
    else:
        print_report(report)


def split_adapter(text: str) -> tuple[Path, float]:
    """Split ``FOLDER:SCALE`` or ``FOLDER``; the folder's name may contain a colon, too."""
    folder, _, scale = text.rpartition(":")
    try:
        return (Path(text), 1.0) if not folder or Path(text).exists() else (Path(folder), float(scale))
    except ValueError:
        return Path(text), 1.0


def print_report(report: ExportReport) -> None:
    """Print the model, each file with its size, and the bytes that are new on disk."""
    source, geometry = report.source, report.geometry
    show.print_rows(
        [
            ("model", f"{source.name} ({geometry.model_type}, {geometry.layers} layers)"),
            *source_rows(source),
            ("weights", show.weights_of(source, geometry)),
            *((name, show.size(count)) for name, count in report.files.items()),
            ("new on disk", show.size(report.new_bytes)),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )
    for note in report.notes:
        click.echo(f"note: {printable(note)}", err=True)
    click.echo(f"wrote {report.output}")
