"""``llmc distill``: export -> checkpoint of a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.bundle import EXPORT_MANIFEST, refuse_bundle
from llmc.cli import output as show
from llmc.cli.options import EXISTING_FILE, debug_option, json_option, output_option, source_path
from llmc.cli.stopping import cleanly_stopped
from llmc.errors import require

if TYPE_CHECKING:
    from llmc.optimize.distill import DistillReport


@click.command("distill")
@click.argument("export", type=source_path)
@click.option("--student", type=int, required=True, metavar="N", help="Layers of the draft model.")
@click.option(
    "--text", type=EXISTING_FILE, required=True, help="Text, or JSONL of chats: its parts are prompts for the model."
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30, help="Time to train.")
@click.option("--steps", type=click.IntRange(min=0), help="Train up to this step instead, for the same result again.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of all that is drawn.")
@output_option
@json_option
@debug_option
def distill_command(
    export: Path, output: Path, student: int, text: Path, minutes: float, steps: int | None, seed: int, as_json: bool
) -> None:
    """Train a draft model for EXPORT, a folder written by llmc export, and write its checkpoint.

    The draft model begins with N of the model's layers, and learns from what the model says after prompts out of the
    text. If the same command is run again, after Ctrl-C too, it goes on. Then: llmc build OUTPUT -o DRAFT --int8, and
    llmc run BUNDLE --draft DRAFT.
    """
    if not (export / EXPORT_MANIFEST).exists():
        refuse_bundle(export, "an export")
    require("torch", "export")
    from llmc.export.student import Student
    from llmc.optimize.distill import distill

    with cleanly_stopped(), show.progress() as progress:
        report = distill(
            export,
            output,
            student=student,
            text=text,
            open_pair=Student,
            minutes=minutes,
            steps=steps,
            seed=seed,
            progress=progress,
        )
    if as_json:
        show.print_json(report)
    else:
        print_report(report)


def print_report(report: DistillReport) -> None:
    """The student, what it learned from, and how often it is right about the next token."""
    show.print_rows(
        [
            ("layers", ", ".join(map(str, report.layers))),
            ("training", f"{report.steps} steps on {show.amount(report.tokens)} tokens that the model wrote"),
            ("acceptance", f"{report.before:.1%} before, {report.after:.1%} now, of greedy drafts one token ahead"),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )
    click.echo(f"wrote {report.output}")
