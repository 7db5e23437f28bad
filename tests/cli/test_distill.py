"""``llmc distill``: one call with the same names, and a report for people or programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.export.student import Student
from llmc.optimize.distill import DistillReport


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the library's ``distill``, which pretends to have worked."""
    made: list[dict[str, Any]] = []

    def distill(source: Path, output: Path, **options: Any) -> DistillReport:
        options.pop("progress")("step 1, divergence 2.50", 0.5)
        made.append({"source": source, "output": output, **options})
        return DistillReport(output, (0, 10, 19, 29), 80, 16_384, 0.0103, 0.25)

    monkeypatch.setattr("llmc.optimize.distill.distill", distill)
    return made


def test_arguments_reach_the_library_and_the_report_says_what_was_gained(llmc, calls, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("Once")
    ran = llmc(
        "distill", tmp_path, "--student", 4, "--text", text, "--minutes", 2, "--narrow", "--seed", 3, "-o", "draft"
    )
    asked = {"student": 4, "text": text, "minutes": 2.0, "steps": None, "seed": 3, "open_pair": Student, "narrow": True}
    assert calls == [{"source": tmp_path, "output": Path("draft"), **asked}]
    assert ran.code == 0
    for said in ("0, 10, 19, 29", "80 steps on 16,384 tokens", "1.0% of the model's greedy tokens before, 25.0% after"):
        assert said in ran.out
    ran = llmc("distill", tmp_path, "--student", 4, "--text", text, "--steps", 80, "-o", "draft", "--json")
    assert json.loads(ran.out)["after"] == 0.25


def test_what_is_no_export_is_refused(llmc, calls, tiny_bundle: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("Once")
    ran = llmc("distill", tiny_bundle, "--student", 1, "--text", tmp_path / "text.txt", "-o", tmp_path / "new")
    assert (ran.code, calls) == (1, [])
    assert "is a bundle, expected an export" in ran.err
