"""``llmc verify``: check that a bundle is complete and computes the same results here as when it was built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.bundle import read_bundle
from llmc.cli import output as show
from llmc.cli.options import bundle_argument, debug_option, emulate_option, json_option, threads_option

if TYPE_CHECKING:
    from llmc.runtime.selftest.values import VerifyReport


@click.command("verify")
@bundle_argument
@threads_option
@emulate_option
@json_option
@debug_option
def verify_command(bundle: Path, threads: int | None, emulate: bool, as_json: bool) -> None:
    """Hash every file of BUNDLE and replay its golden prompts.

    Exits with 1 if a file is corrupt or this machine computes something else.
    """
    from llmc.runtime.loading import verify

    with show.progress() as progress:
        report = verify(bundle, threads=threads, emulate=emulate, progress=progress)
    if as_json:
        show.print_json(report)
        return
    show.print_rows(
        [
            ("files", f"{report.files} whole"),
            *(("not the bundle's", f"{ascii(name)[1:-1]}, which nothing reads") for name in report.unlisted),
            *list_golden_rows(report, embeds=read_bundle(bundle).geometry.encoder is not None),
        ]
    )
    meaning = ""
    if emulate and read_bundle(bundle).device is None:
        meaning = "; it is for the CPU, so --emulate changed nothing"
    elif emulate:
        meaning = " as far as the CPU can tell: the GPU was not used"
    click.echo(f"{bundle} is sound{meaning}")


def list_golden_rows(report: VerifyReport, embeds: bool) -> list[tuple[str, str]]:
    """The results of replaying golden prompts, or golden texts for a bundle that embeds or ranks."""
    difference = f"{report.largest_difference:.2g}"
    if embeds:
        return [("golden texts", f"{report.prompts} replayed"), ("largest difference", difference)]
    if not report.prompts:
        return [("largest difference", f"{difference} in hidden states")]
    return [
        ("golden prompts", f"{report.prompts} replayed"),
        ("equal tokens", _tokens(report)),
        ("largest difference", f"{difference} in logits"),
    ]


def _tokens(report: VerifyReport) -> str:
    if report.tokens == 0:
        return "not compared, for other graphs run here than where the bundle was built"
    ties = " (the rest follow a near tie)" if report.equal_tokens < report.tokens else ""
    return f"{report.equal_tokens} of {report.tokens}{ties}"
