"""Tables, JSON, sizes, and progress that only a terminal sees."""

import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llmc.bundle import Manifest
from llmc.cli import output


@dataclass(frozen=True)
class Inner:
    count: int

    @property
    def doubled(self) -> int:
        return 2 * self.count


@dataclass(frozen=True)
class Outer:
    path: Path
    parts: tuple[Inner, ...]
    by_name: dict[str, Inner]
    nothing: None = None


def test_json_holds_fields_and_properties_at_any_depth(capsys: pytest.CaptureFixture[str]):
    output.print_json(Outer(Path("/a/小"), (Inner(1),), {"x": Inner(2)}))
    assert json.loads(capsys.readouterr().out) == {
        "path": "/a/小",
        "parts": [{"count": 1, "doubled": 2}],
        "by_name": {"x": {"count": 2, "doubled": 4}},
        "nothing": None,
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (11_500_000, "11.5 MB"),
        (1_086_000_000, "1.09 GB"),
        (70_000_000_000_000, "70000.00 GB"),
    ],
)
def test_sizes_are_decimal(count: int, text: str):
    assert output.size(count) == text


def test_tables_are_aligned_and_end_without_blanks(capsys: pytest.CaptureFixture[str]):
    output.print_table(("bundle", "size"), [("int8", "5 MB"), ("int4 [bold]", "30 MB")], numbers=True)
    assert capsys.readouterr().out.splitlines() == ["bundle        size", "int8          5 MB", "int4 [bold]  30 MB"]


@pytest.mark.threat("terminal-escapes")
def test_foreign_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    output.print_rows([("model", "\x1b[2Jtiny\u202e")])
    assert capsys.readouterr().out == "model  \\x1b[2Jtiny\\u202e\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_shows_each_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with output.progress() as report:
        report("reading the checkpoint")
        report("packing [weights]", 0.5)
    assert "packing [weights]" in sys.stderr.getvalue()


def test_a_bundle_far_from_its_model_is_shown_with_a_warning(manifest: Manifest):
    assert manifest.quality is not None
    far = replace(manifest.quality.phases["decode"], mean_kl=1.03)
    quality = replace(manifest.quality, phases={"decode": far})
    assert dict(output.quality_rows(quality))["warning"].startswith("KL 1.03 is far")
    assert "warning" not in dict(output.quality_rows(manifest.quality))
