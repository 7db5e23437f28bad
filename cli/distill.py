"""``llmc distill``: export -> checkpoint of a draft model."""

from pathlib import Path
from typing import Any

import click

from llmc.bundle import refuse_bundle
from llmc.cli import output as show
from llmc.cli.options import EXISTING_FILE, EXISTING_FOLDER, debug_option, json_option, output_option
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import require


@click.command("distill")
@click.argument("export", type=EXISTING_FOLDER)
@click.option("--student", type=int, required=True, metavar="N", help="Layers of the draft model.")
@click.option("--narrow", is_flag=True, help="Half of its neurons and, where KV heads are even, of its heads.")
@click.option("--text", type=EXISTING_FILE, required=True, help="Text, or JSONL of chats, to take prompts out of.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=30, help="Time to train, after the first texts."
)
@click.option(
    "--steps", type=click.IntRange(1), help="Train up to this step instead, which gives the same result again."
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of all that is drawn.")
@output_option
@json_option
@debug_option
def distill_command(export: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Train a draft model for EXPORT, and write its checkpoint.

    It begins with N of the layers, and learns from what the model says after parts of the text. The same command goes
    on with it, after Ctrl-C too. To use it: llmc build OUTPUT -o DRAFT, and llmc run BUNDLE --draft DRAFT.
    """
    refuse_bundle(export, "an export")
    require("torch", "export")
    from llmc.export.student import Student
    from llmc.optimize.distill import distill

    with cleanly_stopped(), show.progress() as progress:
        report = distill(export, output, open_pair=Student, progress=progress, **options)
    if as_json:
        show.print_json(report)
        return
    shown = [
        ("layers", ", ".join(map(str, report.layers))),
        ("training", f"{report.steps} steps on {show.amount(report.tokens)} tokens that the model wrote"),
        ("agreement", f"{report.before:.1%} of the model's greedy tokens before, {report.after:.1%} after"),
    ]
    show.print_rows(shown)
    click.echo(f"wrote {output}")
