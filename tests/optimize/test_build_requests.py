"""A build that cannot begin says why in a sentence and touches nothing."""

import json
from pathlib import Path

import pytest

from llmc.bundle import GRAPH_CONTRACT_VERSION, SCHEMA_VERSION
from llmc.errors import BundleError, UsageError
from llmc.optimize.build import build

# --------------------------------------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "tpu"}, "target 'tpu' is unknown; expected one of cpu"),
        ({"precision": "int3"}, "precision is 'int3', expected one of fp32, fp16, int8, int4"),
        ({"max_context": 129}, "max_context is 129, expected "),
        ({"max_context": -5}, "max_context is -5, expected "),
        ({"max_batch": 0}, "max_batch is 0, expected 1 ... 1024"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(source, untouched, options, sentence):
    with pytest.raises(UsageError) as refused:
        build(source, untouched, force=True, **options)
    assert sentence in str(refused.value)


def test_a_recipe_that_makes_no_sense_is_refused(source, untouched, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("block = 64\n")
    with pytest.raises(UsageError, match=r"mine\.toml: unknown key 'block'; did you mean 'block_size'"):
        build(source, untouched, force=True, recipe=recipe)


def test_dumps_do_not_go_into_the_bundle(source, untouched):
    for dump in (untouched, untouched / "dump"):
        with pytest.raises(UsageError, match="lies in the output folder"):
            build(source, untouched, force=True, dump=dump)


@pytest.fixture
def kept(tmp_path):
    """A folder with a file in it; afterwards the file must be all that there is, unchanged."""
    folder = tmp_path / "kept" / "bundle"
    folder.mkdir(parents=True)
    yield folder
    [file] = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert file.read_text() == "kept"


@pytest.mark.parametrize("name", ["llmc.json", "thesis.tex"])
def test_an_output_that_exists_is_refused_without_force(source, kept, name):
    (kept / name).write_text("kept")
    with pytest.raises(UsageError, match=r"bundle exists; choose another output folder, or pass --force"):
        build(source, kept)


def test_a_folder_of_somebody_else_is_refused_even_with_force(source, kept):
    (kept / "thesis.tex").write_text("kept")
    with pytest.raises(UsageError, match="is not llmc's, so --force does not replace it"):
        build(source, kept, force=True)


def test_the_export_itself_is_no_output(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    for same in (source, tmp_path / "link", source / ".." / "export"):
        with pytest.raises(UsageError, match="is the export itself; choose another output folder"):
            build(source, same, force=True)
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == before


# --------------------------------------------------------------------------------------------------------- the export


def test_a_folder_that_is_no_export_is_refused(untouched, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "empty", tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(BundleError, match=f"{folder.name}: no export.json here, not written by llmc; make it with"):
            build(folder, untouched, force=True)


def change_manifest(source: Path, **changes: object) -> None:
    manifest = json.loads((source / "export.json").read_text())
    (source / "export.json").write_text(json.dumps(manifest | changes))


def test_an_export_of_a_newer_llmc_is_refused(source, untouched):
    change_manifest(source, schema_version=99, llmc_version="9.9")
    with pytest.raises(
        BundleError, match=rf"version 99, written by llmc 9\.9; this llmc reads up to {SCHEMA_VERSION}: upgrade"
    ):
        build(source, untouched, force=True)


def test_an_export_of_another_graph_contract_is_refused(source, untouched):
    change_manifest(source, graph_contract=1)
    with pytest.raises(
        BundleError, match=f"graph contract 1, not {GRAPH_CONTRACT_VERSION}; make it again with: llmc export"
    ):
        build(source, untouched, force=True)


def test_a_corrupt_manifest_is_refused(source, untouched):
    (source / "export.json").write_text((source / "export.json").read_text()[:-20])
    with pytest.raises(BundleError, match=r"export\.json is corrupt"):
        build(source, untouched, force=True)
