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
    threads_option,
    verify_option,
)
from llmc.errors import UsageError, require

if TYPE_CHECKING:
    from llmc.bundle import Quality
    from llmc.optimize.judge.layers import LayerError


@click.command("eval", short_help="Judge BUNDLE on a text, through prefill and through decode.")
@bundle_argument
@click.option("--text", type=EXISTING_FILE, help="Text, or JSONL of chats, to judge on.  [default: one of llmc's]")
@click.option("--reference", type=EXISTING_FOLDER, help="Export that BUNDLE was built from, to compare with.")
@click.option("--window", type=int, help="Tokens per window; each starts from an empty cache.  [default: 256]")
@click.option("--max-windows", type=int, help="Windows at most, evenly spread over the text.  [default: 6]")
@click.option("--layers", is_flag=True, help="Measure the error of each layer on its own, too.")
@threads_option
@verify_option
@emulate_option
@json_option
@debug_option
def eval_command(
    bundle: Path,
    text: Path | None,
    reference: Path | None,
    window: int | None,
    max_windows: int | None,
    layers: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge BUNDLE on a text, through prefill and through decode, for they are different graphs.

    Perplexity is over windows of the text that do not overlap; the first token of each is not scored. With the
    reference: KL(reference || bundle), how often both choose the same token, and how long greedy answers agree.
    """
    require("onnx_ir", "build")
    if layers:
        if reference is None:
            raise click.UsageError("--layers compares with the unquantized model: give --reference EXPORT")
        compute = read_bundle(bundle).recipe.compute
        if compute != "float32":
            raise UsageError(
                "layers",
                f"compares in float32, and {bundle} computes in {compute}",
                "leave it out, or build with a budget (--max-kl), which says which layers lose the most",
            )
    from llmc.optimize.judge.evaluate import MAX_WINDOWS, evaluate, read_windows
    from llmc.optimize.judge.layers import WINDOWS, layer_errors
    from llmc.optimize.judge.reference import Reference
    from llmc.runtime import Generator, load

    with show.progress() as progress:
        with load(bundle, kind=Generator, **options) as model:
            windows = read_windows(text, model, window, MAX_WINDOWS if max_windows is None else max_windows)
            quality = evaluate(model, windows, reference=reference, progress=progress)
            manifest = model.manifest
        errors: tuple[LayerError, ...] = ()
        if layers and reference is not None:
            errors = layer_errors(bundle, manifest, Reference(reference), windows.ids[:WINDOWS], progress)
    if text is None:
        click.echo("no --text was given: this is llmc's own text, not yours", err=True)
    if as_json:
        # The worse path's figures are at the top, each path's below ``phases``.
        show.print_json({"bundle": bundle, **show.as_dict(quality), "layers": errors})
    else:
        print_report(bundle, quality, errors)


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
