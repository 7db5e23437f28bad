"""A build that cannot begin says why in a sentence and touches nothing."""

import pytest

from llmc.errors import BundleError, UsageError
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest


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
        build(BuildRequest(source, kept))


def test_a_folder_of_somebody_else_is_refused_even_with_force(source, kept):
    (kept / "thesis.tex").write_text("kept")
    with pytest.raises(UsageError, match="is not llmc's, so --force does not replace it"):
        build(BuildRequest(source, kept, force=True))


def test_the_export_itself_is_no_output(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    for same in (source, tmp_path / "link", source / ".." / "export"):
        with pytest.raises(UsageError, match="is the export itself; choose another output folder"):
            build(BuildRequest(source, same, force=True))
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_a_folder_that_is_no_export_is_refused(untouched, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "empty", tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(BundleError, match=f"{folder.name}: no export.json here, not written by llmc; make it with"):
            build(BuildRequest(folder, untouched, force=True))


@pytest.mark.parametrize("output", ["/", "x" * 300 + "/bundle"], ids=["root", "long"])
def test_a_place_that_cannot_be_written_is_refused(source, tmp_path, output):
    with pytest.raises(UsageError, match="choose another"):
        build(BuildRequest(source, tmp_path / output))
