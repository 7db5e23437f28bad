"""``llmc build``: one call with the same names; a checkpoint is exported on the way, and nothing of that stays."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llmc as llmc_package
from llmc import bundle
from llmc.optimize.recipe import BuildRequest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("option", "said"),
    [("--source", "the checkpoint is not quantized"), ("--max-context=9999", "--max-context is 9999")],
)
def test_what_does_not_suit_the_model_is_refused_before_the_export(
    llmc, library, tiny_checkpoint, tmp_path, option, said
):
    result = llmc("build", tiny_checkpoint, "-o", tmp_path / "out", option)
    assert result.code == 2 and said in result.err
    assert not library.exported


def test_help_names_every_recipe(llmc):
    named = set(re.findall(r"[\w-]+", llmc("build", "--help").out))
    assert {path.stem for path in (Path(llmc_package.__path__[0]) / "recipes").glob("*.toml")} <= named


def test_defaults_are_the_librarys(llmc, library: Any, export_folder: Path, tmp_path: Path):
    assert llmc("build", export_folder, "-o", tmp_path / "out").code == 0
    [built] = library.built
    assert built.pop("there") and built.pop("decoder") is not None
    assert BuildRequest(**built) == BuildRequest(export_folder, tmp_path / "out")
    assert library.exported == []


def test_options_reach_the_library_under_their_own_names(llmc, library: Any, export_folder: Path, tmp_path: Path):
    recipe = tmp_path / "small.toml"
    recipe.write_text("")
    options = ["--max-context", 64, "--max-batch", 2, "--recipe", recipe, "--force", "--target", "x"]
    llmc("build", export_folder, "-o", "out", "--int4", "--small", *options)
    asked = {
        "precision": "int4",
        "phases": "shared",
        "max_context": 64,
        "max_batch": 2,
        "recipe": recipe,
        "force": True,
    }
    assert library.built[0].items() >= {**asked, "target": "x"}.items()


def test_a_budget_and_a_calibration_reach_the_library(llmc, library: Any, export_folder: Path, tmp_path: Path):
    for name in ("mine.txt", "judge.txt"):
        (tmp_path / name).write_text("words")
    options = ["--max-kl", 0.05, "--min-agreement", 0.9, "--max-perplexity-increase", 0.02]
    options += [
        "--calibration",
        tmp_path / "mine.txt",
        "--samples",
        3,
        "--length",
        77,
        "--text",
        tmp_path / "judge.txt",
    ]
    assert llmc("build", export_folder, "-o", "out", *options).code == 0
    [built] = library.built
    assert built["budget"] == bundle.Budget(0.05, 0.9, 0.02)
    assert built["text"] == tmp_path / "judge.txt"
    assert (built["calibration"], built["samples"], built["length"]) == (tmp_path / "mine.txt", 3, 77)


def test_a_report_names_the_command(llmc, library: Any, export_folder: Path):
    for options in ((), ("--report",)):
        assert llmc("build", export_folder, "-o", "an out", *options).code == 0
    assert [built["report"] for built in library.built] == [None, f"llmc build {export_folder} -o 'an out' --report"]


# ---------------------------------------------------------------------------------------------------- sizes and recipes


def test_a_recipe_of_llmc_is_found_by_its_name(llmc, library: Any, export_folder: Path):
    shipped = sorted((Path(llmc_package.__path__[0]) / "recipes").glob("*.toml"))
    for path in shipped:
        llmc("build", export_folder, "-o", "out", "--recipe", path.stem)
    assert [built["recipe"] for built in library.built] == shipped


@pytest.mark.parametrize("name", ["int5", "missing.toml", "int4.toml"])
def test_a_recipe_that_is_nowhere_is_refused_with_the_names_there_are(
    llmc, library: Any, export_folder: Path, name: str
):
    ran = llmc("build", export_folder, "-o", "out", "--recipe", name)
    assert (ran.code, library.built) == (2, [])
    assert f"--recipe is {name!r}, expected a file or one of " in ran.err
    assert "int4, " in ran.err


def test_stages_are_a_number_of_them_or_the_memory_of_their_boxes(llmc, library: Any, export_folder: Path):
    for given, wanted in (("3", (0, 0, 0)), ("8GB,1.5GiB", (8 * 10**9, 3 << 29))):
        assert llmc("build", export_folder, "-o", f"out{given}", "--stages", given).code == 0
        assert library.built[-1]["stages"] == wanted
    for given in ("", "two", "0", "1", "8GB,", "-1", "8GB;8GB"):
        assert llmc("build", export_folder, "-o", "out", "--stages", given).code == 2


# ----------------------------------------------------------------------------------------------------------- precisions


def test_a_checkpoint_is_exported_beside_the_output_and_cleared_away(
    llmc, library: Any, checkpoint: Path, tmp_path: Path
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


def test_an_output_that_exists_is_refused_before_any_work(llmc, library: Any, checkpoint: Path, tmp_path: Path):
    ran = llmc("build", checkpoint, "-o", tmp_path)
    assert (ran.code, library.exported, library.built) == (2, [], [])
    assert f"{tmp_path} exists" in ran.err


def test_report_shows_recipe_quality_and_sizes(llmc, library: Any, export_folder: Path):
    ran = llmc("build", export_folder, "-o", "out")
    for text in ("int8, blocks of 128, split phases", "KL 0.00100 mean", "98.0%", "5.0 MB", "2.5 s", "wrote out"):
        assert text in ran.out
    assert "num_beams=4 is not supported and was left out" in ran.out, "what the bundle notes"
    assert ran.err == ""


def test_of_a_model_in_stages_the_report_says_where_the_others_are(llmc, library: Any, export_folder: Path):
    library.manifest = replace(library.manifest, stage=bundle.Stage(1, (0, 1), ("0" * 64,)))
    lines = llmc("build", export_folder, "-o", "out", "--stages", "2").out.splitlines()
    assert lines[-1] == "the sizes above are of the last stage; before it: out/stage-0"
