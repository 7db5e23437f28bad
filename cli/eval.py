"""``llmc eval``: measure a bundle's quality on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.bundle import read_bundle
from llmc.cli import output as show
from llmc.cli.options import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    bundle_argument,
    debug_option,
    emulate_option,
    json_option,
    new_path,
    threads_option,
    verify_option,
)
from llmc.errors import UsageError, require
from llmc.publish import replace_file

if TYPE_CHECKING:
    from llmc.bundle import Quality
    from llmc.optimize.judge.layers import LayerError
    from llmc.optimize.judge.report import Better


@click.command("eval", short_help="Judge BUNDLE on a text, through prefill and through decode.")
@bundle_argument
@click.option("--text", type=EXISTING_FILE, help="Text, or JSONL of chats, to judge on.  [default: one of llmc's]")
@click.option("--reference", type=EXISTING_FOLDER, help="Export that BUNDLE was built from, to compare with.")
@click.option("--window", type=int, help="Tokens per window; each starts from an empty cache.  [default: 256]")
@click.option("--max-windows", type=int, help="Windows at most, evenly spread over the text.  [default: 6]")
@click.option("--layers", is_flag=True, help="Measure the error of each layer on its own, too.")
@click.option(
    "--report", type=new_path, metavar="FILE.html", help="Write a page with KL by phase, layer and position, too."
)
@threads_option
@verify_option
@emulate_option
@json_option
@debug_option
@click.pass_obj
def eval_command(
    command: str,
    /,
    bundle: Path,
    text: Path | None,
    reference: Path | None,
    window: int | None,
    max_windows: int | None,
    layers: bool,
    report: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge BUNDLE on a text, through prefill and through decode, for they are different graphs.

    Perplexity is over windows of the text that do not overlap; the first token of each is not scored. With the
    reference: KL(reference || bundle), how often both choose the same token, and how long greedy answers agree.
    """
    require("onnx_ir", "build")
    if report is not None:
        refuse_report(report, bundle)
    if layers or report is not None:
        name = "layers" if layers else "report"
        if reference is None:
            raise click.UsageError(f"--{name} compares with the unquantized model: give --reference EXPORT")
        compute = read_bundle(bundle).recipe.compute
        if compute != "float32":
            raise UsageError(
                name,
                f"compares in float32, and {bundle} computes in {compute}",
                "leave it out, or build with --report, which writes the page into the bundle",
            )
    from llmc.optimize.judge.evaluate import MAX_WINDOWS, evaluate, read_windows
    from llmc.optimize.judge.layers import KL_TOKENS, WINDOWS, layer_errors
    from llmc.optimize.judge.reference import Reference
    from llmc.optimize.judge.report import list_better, render
    from llmc.runtime import Generator, load

    with show.progress() as progress:
        with load(bundle, kind=Generator, **options) as model:
            windows = read_windows(text, model, window, MAX_WINDOWS if max_windows is None else max_windows)
            judged = evaluate(model, windows, reference=reference, progress=progress)
            manifest = model.manifest
        errors: tuple[LayerError, ...] = ()
        better: tuple[Better, ...] = ()
        if reference is not None and (layers or report is not None):
            ids = windows.ids[:WINDOWS] if report is None else windows.ids[:WINDOWS, :KL_TOKENS]
            errors = layer_errors(bundle, manifest, Reference(reference), ids, progress, kl=report is not None)
    if text is None:
        click.echo("no --text was given: this is llmc's own text, not yours", err=True)
    if report is not None:
        better = list_better(bundle, manifest)
        write_page(report, render(manifest, judged, errors, better, command))
    if as_json:
        # The worse path's figures are at the top, each path's below ``phases``.
        figures = {**show.as_dict(judged.quality), "losses": judged.losses, "layers": errors, "better": better}
        show.print_json({"bundle": bundle, **figures})
    else:
        print_report(bundle, judged.quality, errors)


def refuse_report(path: Path, bundle: Path) -> None:
    """Refuse a file for the page before minutes of measuring: a bundle's files are fixed by its manifest."""
    if path.suffix != ".html" or path.is_dir() or not path.parent.is_dir():
        raise UsageError("report", f"is {path}, expected a file in an existing folder that ends with .html")
    if bundle.resolve() in path.resolve().parents:
        raise UsageError(
            "report",
            f"is {path}, which is inside the bundle, whose files do not change any more",
            "name a file elsewhere; llmc build --report writes a page into its bundle",
        )


def write_page(path: Path, page: str) -> None:
    try:
        with replace_file(path, f".{path.name}-") as file:
            file.write(page.encode())
    except OSError as error:
        raise UsageError("report", f"is {path}, which cannot be written ({error.strerror})", "name another") from error


def print_report(bundle: Path, quality: Quality, errors: tuple[LayerError, ...]) -> None:
    show.print_rows([("bundle", str(bundle)), *show.quality_rows(quality)])
    if not errors:
        return
    decibels: dict[str, dict[str, str]] = {}
    for error in errors:
        decibels.setdefault(error.name, {})[error.phase] = f"{error.decibels:.1f} dB"
    click.echo()
    rows = [(name, found["prefill"], found["decode"]) for name, found in decibels.items()]
    show.print_table(("signal to noise", "prefill", "decode"), rows, numbers=True)
