"""``llmc build``: portable graph -> bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.bundle import EXPORT_MANIFEST, refuse_to_overwrite
from llmc.cli import output as show
from llmc.cli.options import EXISTING_FILE, EXISTING_FOLDER, debug_option, force_option, json_option, output_option
from llmc.errors import UsageError, require

if TYPE_CHECKING:
    from llmc.optimize.build import BuildReport

PRECISIONS = ("fp32", "int8", "int4")


@click.command("build")
@click.argument("source", type=EXISTING_FOLDER)
@output_option
@click.option("--target", default="cpu", help="What the bundle will run on.")
@click.option("--fp32", is_flag=True, help="Keep the weights in full precision.")
@click.option("--int8", is_flag=True, help="8-bit weights.  [default]")
@click.option("--int4", is_flag=True, help="4-bit weights.")
@click.option("--max-context", type=int, help="Longest sequence in tokens.  [default: the model's, at most 32768]")
@click.option("--max-batch", type=int, help="Sequences at a time.  [default: 1]")
@click.option("--recipe", type=EXISTING_FILE, help="TOML file that says how weights are compiled.")
@click.option("--dump", type=click.Path(file_okay=False, path_type=Path), help="Write the graph after each pass here.")
@force_option
@json_option
@debug_option
def build_command(
    source: Path,
    output: Path,
    target: str,
    fp32: bool,
    int8: bool,
    int4: bool,
    max_context: int | None,
    max_batch: int | None,
    recipe: Path | None,
    dump: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build a bundle from SOURCE, an export or a Hugging Face checkpoint, and verify it.

    A checkpoint is exported on the way.
    """
    require("onnx_ir", "export")
    from llmc.optimize.build import build

    precision = chosen_precision((fp32, int8, int4))
    refuse_to_overwrite(output, force)
    with show.progress() as progress, exported(source, output, progress) as export:
        report = build(
            export,
            output,
            target=target,
            precision=precision,
            max_context=max_context,
            max_batch=max_batch,
            recipe=recipe,
            force=force,
            dump=dump,
            progress=progress,
        )
    if as_json:
        show.print_json(report)
    else:
        print_report(report)


def chosen_precision(flags: tuple[bool, ...]) -> str | None:
    """The one precision that was asked for, None for the default."""
    chosen = [name for name, flag in zip(PRECISIONS, flags, strict=True) if flag]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} contradict each other: give one of them")
    return chosen[0] if chosen else None


@contextmanager
def exported(source: Path, output: Path, progress: show.Report) -> Iterator[Path]:
    """``source`` if it is an export, else an export of it for as long as the block runs, near ``output``."""
    if (source / EXPORT_MANIFEST).exists() or not (source / "config.json").exists():
        yield source
        return
    from llmc.export import export

    near = next(folder for folder in Path(output).resolve().parents if folder.is_dir())
    try:
        temporary = tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".export", dir=near)
    except OSError as error:
        raise UsageError(f"{output}: cannot write here ({error.strerror}); choose another output folder") from error
    with temporary as folder:
        yield export(source, Path(folder) / source.resolve().name, progress=progress).output


def print_report(report: BuildReport) -> None:
    """What was built, how large it is, and how close to the unquantized model."""
    manifest = report.manifest
    recipe, limits, quality = manifest.recipe, manifest.limits, manifest.quality
    rows = [
        ("model", f"{manifest.source.name}, {show.amount(manifest.source.parameters)} parameters"),
        ("target", f"{manifest.target.name}, {manifest.target.engine} {manifest.target.engine_version}"),
        ("recipe", show.recipe(recipe)),
        ("limits", f"{limits.max_context} tokens x {limits.max_batch}"),
        *show.quality_rows(quality),
        *((name, show.size(entry.size)) for name, entry in manifest.files.items()),
        ("total", show.size(report.size)),
        ("time", f"{report.seconds:.1f} s"),
    ]
    show.print_rows(rows)
    click.echo(f"wrote {report.output}")
