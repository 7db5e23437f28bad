"""``llmc build``: portable graph -> bundle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import ADAPTER_FILE, CONFIG_FILE, EXPORT_MANIFEST, STAGE_FOLDER, refuse_bundle
from llmc.cli import output as show
from llmc.cli.inspect import adapter_rows, bundle_rows
from llmc.cli.options import (
    EXISTING_FILE,
    debug_option,
    force_option,
    json_option,
    make_request,
    memory_option,
    new_path,
    precision_options,
    recipe_option,
    small_option,
    source_path,
    stages_option,
)
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import require
from llmc.publish import refuse_to_overwrite, work_folder

if TYPE_CHECKING:
    from llmc.optimize.build import BuildReport
    from llmc.optimize.recipe import BuildRequest

# Options that --rebuild takes.
REBUILDING = ("source", "output", "rebuild", "force", "as_json", "debug")


@click.command("build", short_help="Build a bundle from an export or a checkpoint, and verify it.")
@click.argument("source", type=source_path)
@click.option("-o", "--output", type=new_path, metavar="PATH", help="Folder to write; --rebuild: by default SOURCE.")
@click.option("--target", default="cpu", help="What it will run on: cpu, cuda, tensorrt or tensorrt-rtx.")
@precision_options
@small_option
@click.option("--max-context", type=int, help="Longest sequence.  [default: the model's, at most 32768; TensorRT 4096]")
@click.option("--max-batch", type=int, help="Sequences at a time.  [default: 8]")
@click.option("--adapters", type=int, help="LoRA adapters that may be loaded beside the model at a time.  [default: 0]")
@click.option("--rank", type=int, help="Largest rank of theirs.  [default: 16]")
@click.option(
    "--head", "draft_head", type=source_path, help="Export of a draft head, which gets the hidden states that it reads."
)
@recipe_option
@click.option(
    "--calibration",
    type=EXISTING_FILE,
    help="Text, or JSONL of chats, that decides how 4-bit weights are rounded.  [default: a short one of llmc's]",
)
@click.option("--no-calibration", is_flag=True, help="Round weights without a text, in seconds.")
@click.option("--samples", type=int, help="Windows of the calibration text.  [default: 16]")
@click.option("--length", type=int, help="Tokens in each of them.  [default: 512]")
@click.option("--text", type=EXISTING_FILE, help="Text that quality is judged on.  [default: a short one of llmc's]")
@click.option("--max-kl", type=float, help="Fail if the mean KL divergence from the unquantized model is larger.")
@click.option("--min-agreement", type=float, help="Fail if it chooses the same token less often, 0 ... 1.")
@click.option("--max-perplexity-increase", type=float, help="Fail if perplexity grows by more, 0.02 for 2 %.")
@click.option("--report", is_flag=True, help="Write quality.html into the bundle: KL by phase, layer and position.")
@click.option("--rebuild", is_flag=True, help="SOURCE is a TensorRT bundle: compile its engine anew for this machine.")
@click.option("--compute-capabilities", help="TensorRT-RTX: GPUs to build for, as 8.6,8.9.  [default: the library's]")
@click.option("--deferred", is_flag=True, default=None, help="TensorRT: no engine yet; --rebuild makes it there.")
@stages_option
@memory_option
@force_option
@json_option
@debug_option
@click.pass_obj
def build_command(
    command: str,
    /,
    source: Path,
    output: Path | None,
    rebuild: bool,
    force: bool,
    report: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Build a bundle from SOURCE, an export, a Hugging Face checkpoint or a GGUF file, and verify it.

    A checkpoint is exported on the way.
    """
    require("onnx_ir", "export" if is_checkpoint(source) else "build")
    if rebuild:
        context = click.get_current_context()
        for option in context.command.params:
            given = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
            if given and option.name not in REBUILDING:
                raise click.UsageError(
                    f"{option.opts[-1]} means nothing to --rebuild, whose graph and options are the bundle's; leave it "
                    "out, or build the bundle again from its export"
                )
        from llmc.optimize.rebuild import rebuild as rebuild_bundle

        with cleanly_stopped(), show.progress() as progress:
            built = rebuild_bundle(source, output or source, force=force or output is None, progress=progress)
    else:
        if output is None:
            raise click.UsageError("Missing option '-o' / '--output'.")
        from llmc.optimize.build import build

        refuse_to_overwrite(output, force)
        choices["report"] = command if report else None  # the page names it
        request = make_request(source, output=output, force=force, **choices)
        with cleanly_stopped(), show.progress() as progress, open_export(request, progress) as export:
            built = build(replace(request, source=export), progress)
    if as_json:
        show.print_json(built)
    else:
        print_report(built)


def is_checkpoint(source: Path) -> bool:
    """True of what must be exported first."""
    named = any((source / name).exists() for name in (CONFIG_FILE, ADAPTER_FILE))
    return source.is_file() or (named and not (source / EXPORT_MANIFEST).exists())


@contextmanager
def open_export(request: BuildRequest, progress: show.Report) -> Iterator[Path]:
    """The request's source if it is an export, else an export of it for as long as the block runs, near the output;
    made only if the request suits the model."""
    source = request.source
    if not is_checkpoint(source):
        refuse_bundle(source, "an export or a checkpoint")
        yield source
        return
    from llmc.cli.plan import check_export
    from llmc.export import export
    from llmc.optimize.build import check_memory

    if checked := check_export(source, memory=request.memory):
        check_memory(request.filled(), *checked)
    with work_folder(request.output) as folder:
        yield export(source, folder / source.resolve().name.removesuffix(".gguf"), progress=progress).output


def print_report(report: BuildReport) -> None:
    """The bundle, its size, its distance from the unquantized model, and what its user should know."""
    manifest = report.manifest
    rows = [
        ("model", f"{manifest.source.name}, {show.amount(manifest.source.parameters)} parameters"),
        *adapter_rows(manifest.source),
        *bundle_rows(manifest),
        *((name, show.size(entry.size)) for name, entry in manifest.files.items()),
        ("total", show.size(report.size)),
        ("time", f"{report.seconds:.1f} s"),
        *(("note", note) for note in manifest.notes),
    ]
    show.print_rows(rows)
    click.echo(f"wrote {report.output}")
    if before := [f"{report.output / STAGE_FOLDER.format(number)}" for number in range(len(manifest.stage.before))]:
        click.echo(f"the sizes above are of the last stage; before it: {', '.join(before)}")
    if manifest.engine is not None and not manifest.engine.file:
        click.echo(f"its engine is made where it is to run: llmc build --rebuild {report.output}")
