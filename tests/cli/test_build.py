"""``llmc build``: one call with the same names; a checkpoint is exported on the way, and nothing of that stays."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc import bundle
from llmc.errors import BuildError
from llmc.optimize.build import BuildReport


class FakeLibrary:
    """``build`` and ``export`` that only take notes."""

    def __init__(self, manifest: bundle.Manifest) -> None:
        self.manifest = manifest
        self.built: list[dict[str, Any]] = []
        self.exported: list[tuple[Path, Path]] = []
        self.error: BaseException | None = None

    def build(self, source: Path, output: Path, *, progress: Any, **options: Any) -> BuildReport:
        progress("lowering")
        self.built.append({"source": source, "output": output, "there": source.is_dir(), **options})
        if self.error:
            raise self.error
        files = {"decode.onnx": bundle.FileEntry(5_000_000, "0" * 64)}
        return BuildReport(output, dataclasses.replace(self.manifest, files=files), 2.5)

    def export(self, checkpoint: Path, output: Path, *, progress: Any) -> SimpleNamespace:
        progress("exporting the graph")
        self.exported.append((checkpoint, output))
        output.mkdir()
        return SimpleNamespace(output=output)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, manifest: bundle.Manifest) -> FakeLibrary:
    fake = FakeLibrary(manifest)
    monkeypatch.setattr("llmc.optimize.build.build", fake.build)
    monkeypatch.setattr("llmc.export.export", fake.export)
    return fake


@pytest.fixture
def export_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "export.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


DEFAULTS = {
    "target": "cpu",
    "precision": None,
    "max_context": None,
    "max_batch": None,
    "recipe": None,
    "force": False,
    "dump": None,
}


def test_defaults_are_the_librarys(llmc, library: FakeLibrary, export_folder: Path, tmp_path: Path):
    assert llmc("build", export_folder, "-o", tmp_path / "out").code == 0
    assert library.built == [{"source": export_folder, "output": tmp_path / "out", "there": True, **DEFAULTS}]
    assert library.exported == []


def test_options_reach_the_library_under_their_own_names(
    llmc, library: FakeLibrary, export_folder: Path, tmp_path: Path
):
    recipe = tmp_path / "small.toml"
    recipe.write_text("")
    options = [
        "--max-context",
        64,
        "--max-batch",
        2,
        "--recipe",
        recipe,
        "--force",
        "--dump",
        tmp_path,
        "--target",
        "x",
    ]
    llmc("build", export_folder, "-o", "out", "--int4", *options)
    asked = {"precision": "int4", "max_context": 64, "max_batch": 2, "recipe": recipe, "force": True}
    assert library.built[0].items() >= {**asked, "dump": tmp_path, "target": "x"}.items()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_each_precision_has_its_flag(llmc, library: FakeLibrary, export_folder: Path, precision: str):
    llmc("build", export_folder, "-o", "out", f"--{precision}")
    assert library.built[0]["precision"] == precision


def test_two_precisions_contradict_each_other(llmc, library: FakeLibrary, export_folder: Path):
    ran = llmc("build", export_folder, "-o", "out", "--int8", "--int4")
    assert (ran.code, library.built) == (2, [])
    assert "--int8 and --int4 contradict each other" in ran.err


def test_a_checkpoint_is_exported_beside_the_output_and_cleared_away(
    llmc, library: FakeLibrary, checkpoint: Path, tmp_path: Path
):
    output = tmp_path / "new" / "out"
    assert llmc("build", checkpoint, "-o", output).code == 0
    [(source, export)] = library.exported
    assert source == checkpoint
    assert export.name == "checkpoint"
    assert tmp_path in export.parents
    assert library.built[0]["source"] == export
    assert library.built[0]["there"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("error", [BuildError("no lowering for this"), KeyboardInterrupt()])
def test_a_failed_build_clears_the_export_away_too(
    llmc, library: FakeLibrary, checkpoint: Path, tmp_path: Path, error: BaseException
):
    library.error = error
    assert llmc("build", checkpoint, "-o", tmp_path / "out").code in (1, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_output_that_exists_is_refused_before_any_work(llmc, library: FakeLibrary, checkpoint: Path, tmp_path: Path):
    ran = llmc("build", checkpoint, "-o", tmp_path)
    assert (ran.code, library.exported, library.built) == (2, [], [])
    assert f"{tmp_path} exists" in ran.err


def test_a_folder_of_neither_kind_is_left_to_the_library_to_refuse(llmc, tmp_path: Path):
    source = tmp_path / "empty"
    source.mkdir()
    ran = llmc("build", source, "-o", tmp_path / "out")
    assert ran.code == 1
    assert f"{source}: no export.json here" in ran.err


def test_report_shows_recipe_quality_and_sizes(llmc, library: FakeLibrary, export_folder: Path):
    ran = llmc("build", export_folder, "-o", "out")
    for text in ("int8, blocks of 128, split phases", "mean KL 0.00100", "98.0%", "5.0 MB", "2.5 s", "wrote out"):
        assert text in ran.out
    assert ran.err == ""


def test_json_is_the_whole_report(llmc, library: FakeLibrary, export_folder: Path):
    report = json.loads(llmc("build", export_folder, "-o", "out", "--json").out)
    assert (report["output"], report["size"]) == ("out", 5_000_000)
    assert report["manifest"]["recipe"]["precision"] == "int8"
    assert report["manifest"]["files"] == {"decode.onnx": {"size": 5_000_000, "sha256": "0" * 64}}
