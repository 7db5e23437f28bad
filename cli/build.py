"""``llmc build``: portable graph -> bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import STAGE_FOLDER
from llmc.cli import output as show
from llmc.cli.inspect import bundle_rows, source_rows
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
    source_argument,
    stages_option,
    take_path,
)
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import require
from llmc.publish import refuse_to_overwrite
from llmc.sources import Kind, Located

if TYPE_CHECKING:
    from llmc.optimize.build import BuildReport

# Options that --rebuild takes.
REBUILDING = ("source", "output", "rebuild", "force", "as_json", "debug")


@click.command("build", short_help="Build a bundle from SOURCE, and verify it.")
@source_argument("source", also=("draft_head",))
@click.option("-o", "--output", type=new_path, metavar="PATH", help="Folder to write; --rebuild: by default SOURCE.")
@click.option("--target", default="cpu", help="What it will run on: cpu, cuda, tensorrt or tensorrt-rtx.")
@precision_options
@small_option
@click.option("--max-context", type=int, help="Longest sequence.  [default: the model's, at most 32768; TensorRT 4096]")
@click.option("--max-batch", type=int, help="Sequences at a time.  [default: 8]")
@click.option("--adapters", type=int, help="LoRA adapters that may be loaded beside the model at a time.  [default: 0]")
@click.option("--rank", type=int, help="Largest rank of theirs.  [default: 16]")
@click.option("--head", "draft_head", help="Export of a draft head, which gets the hidden states that it reads.")
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
    source: Located,
    output: Path | None,
    draft_head: Located | None,
    rebuild: bool,
    force: bool,
    report: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Build a bundle from SOURCE and verify it.

    SOURCE is an export, a checkpoint, a GGUF file or a name at the hub; what is no export is exported on the way.
    """
    require("onnx_ir", "build" if source.kind in (Kind.BUNDLE, Kind.EXPORT) else "export")
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
            folder = source.path
            built = rebuild_bundle(folder, output or folder, force=force or output is None, progress=progress)
    else:
        if output is None:
            raise click.UsageError("Missing option '-o' / '--output'.")
        from llmc.optimize.build import build
        from llmc.sources.built import open_export

        kinds = Kind.EXPORT, Kind.CHECKPOINT, Kind.GGUF, Kind.ADAPTER
        path = take_path(source, *kinds, advice="give what it was built from")
        refuse_to_overwrite(output, force)
        choices["report"] = command if report else None  # the page names it
        head = draft_head.path if draft_head else None
        request = make_request(path, output=output, force=force, draft_head=head, **choices)
        with cleanly_stopped(), show.progress() as progress, open_export(source, request, progress) as export:
            built = build(replace(request, source=export), progress)
    if as_json:
        show.print_json(built)
    else:
        print_report(built)


def print_report(report: BuildReport) -> None:
    """The bundle, its size, its distance from the unquantized model, and what its user should know."""
    manifest = report.manifest
    rows = [
        ("model", f"{manifest.source.name}, {show.amount(manifest.source.parameters)} parameters"),
        *source_rows(manifest.source),
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
