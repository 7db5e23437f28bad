"""``llmc export``: one call with the same names, and a report for people or programs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmc import bundle
from llmc.export import ExportReport


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, manifest: bundle.Manifest, tmp_path: Path) -> list[dict[str, Any]]:
    """Calls of the library's ``export`` of tmp_path, which pretends to have worked."""
    (tmp_path / "config.json").write_text("{}")
    made: list[dict[str, Any]] = []

    def export(checkpoint: Path, output: Path, **options: Any) -> ExportReport:
        options.pop("progress")("reading the checkpoint")
        made.append({"checkpoint": checkpoint, "output": output, **options})
        files = {"decoder.onnx": 74_000, "model.safetensors": 11_500_000}
        notes = ("repetition_penalty=1.1 was left out",)
        return ExportReport(output, files, 75_000, 1.25, manifest.geometry, manifest.source, notes)

    monkeypatch.setattr("llmc.export.export", export)
    return made


def test_arguments_reach_the_library_under_their_own_names(llmc, calls: list[dict[str, Any]], tmp_path: Path):
    (tmp_path / "a:2").mkdir()
    adapters = [part for name in ("sql:0.5", "sql", "a:2") for part in ("--adapter", tmp_path / name)]
    llmc("export", tmp_path, "-o", tmp_path / "out", "--force", *adapters)
    named = [(tmp_path / "sql", 0.5), (tmp_path / "sql", 1.0), (tmp_path / "a:2", 1.0)]
    assert calls == [
        {
            "checkpoint": tmp_path,
            "output": tmp_path / "out",
            "adapters": named,
            "text_only": False,
            "copy": False,
            "of": None,
            "force": True,
        }
    ]


def test_report_shows_sizes_and_time_and_notes_go_to_stderr(llmc, calls: list[dict[str, Any]], tmp_path: Path):
    ran = llmc("export", tmp_path, "-o", "out")
    assert ran.code == 0
    for text in ("tiny (llama, 2 layers)", "74.0 kB", "11.5 MB", "75.0 kB", "1.2 s", "wrote out"):
        assert text in ran.out
    assert ran.err == "note: repetition_penalty=1.1 was left out\n"


@pytest.fixture
def exploding_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer makes thousands of millions of characters of a snowman."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "in" / "exploding")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    doubled = {"type": "Replace", "pattern": {"Regex": "\u2603"}, "content": "\u2603\u2603"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [doubled] * 36}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_tokenizer_that_does_not_work_is_refused_before_any_work(
    llmc, calls: list[dict[str, Any]], exploding_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmc.runtime.text.trial.TRIAL_BYTES", 1 << 29)  # which is full sooner
    ran = llmc("export", exploding_checkpoint, "-o", tmp_path / "out")
    assert (ran.code, calls) == (1, [])
    assert "the tokenizer or chat template does not work: a trial in a separate process" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "in"]
