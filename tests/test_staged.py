"""Publishing a folder: all of it or nothing, whatever happens on the way."""

import errno
import os
from pathlib import Path

import pytest
from doubles.folders import names, publish

from llmc import bundle
from llmc import publish as publishing
from llmc.errors import ResourceError, UsageError
from llmc.publish import staging_folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture
def published(target: Path) -> Path:
    publish(target, "old")
    return target


def test_folder_appears_whole_and_only_at_the_end(target):
    with staging_folder(target) as folder:
        (folder / "llmc.json").write_text("new")
        (folder / "graphs").mkdir()
        (folder / "graphs" / "decode.onnx").write_text("graph")
        assert target.parent in folder.parents
        assert not target.exists()
    assert names(target) == ["graphs", "llmc.json"]
    assert names(target.parent) == ["bundle"]


def test_a_relative_target_is_published_where_the_block_began(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with staging_folder(Path("bundle")) as folder:
        (folder / "llmc.json").write_text("new")
        monkeypatch.chdir("elsewhere")
    assert names(tmp_path / "bundle") == ["llmc.json"]


def test_everything_is_synced_before_it_is_renamed(target, monkeypatch):
    order = []
    monkeypatch.setattr(publishing, "sync", lambda path: order.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append("rename"), rename(self, to))[1])
    publish(target, "new")
    assert order[0] == "llmc.json"
    assert order[-2:] == ["rename", target.parent.name]


@pytest.mark.parametrize("content", ["ours", "empty", "file", "foreign"])
def test_an_existing_target_is_refused_without_force(target, content):
    make_existing(target, content)
    with pytest.raises(UsageError, match=f"{target} exists; .*--force"), staging_folder(target):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("content", ["file", "foreign"])
def test_force_does_not_replace_what_is_not_llmcs(target, content):
    make_existing(target, content)
    with pytest.raises(UsageError, match="is not llmc's"), staging_folder(target, force=True):
        pytest.fail("the block must not run")
    assert target.is_file() if content == "file" else names(target) == ["thesis.tex"]


@pytest.mark.parametrize("content", ["ours", "export", "empty"])
def test_force_replaces_a_folder_of_llmcs_or_an_empty_one(target, content):
    make_existing(target, content)
    publish(target, "new", force=True)
    assert names(target) == ["llmc.json"]
    assert (target / "llmc.json").read_text() == "new"
    assert names(target.parent) == ["bundle"]


def make_existing(target: Path, content: str) -> None:
    if content == "file":
        target.write_text("a file")
        return
    target.mkdir()
    name = {"ours": "llmc.json", "export": "export.json", "foreign": "thesis.tex"}.get(content)
    if name:
        (target / name).write_text("old")


def test_a_link_to_a_bundle_keeps_pointing_at_what_was_replaced(tmp_path, published):
    link = tmp_path / "latest"
    link.symlink_to(published)
    publish(link, "new", force=True)
    assert link.is_symlink()
    assert (published / "llmc.json").read_text() == "new"
    assert names(tmp_path) == ["bundle", "latest"]


@pytest.mark.parametrize("error", [ValueError("bad weights"), KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_an_error_leaves_the_old_folder_and_nothing_else(published, error):
    with pytest.raises(type(error)), staging_folder(published, force=True) as folder:
        (folder / "llmc.json").write_text("half")
        raise error
    assert (published / "llmc.json").read_text() == "old"
    assert names(published.parent) == ["bundle"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_in_one_sentence(published, number):
    with pytest.raises(ResourceError, match="the disk is full; free some space"), staging_folder(published, force=True):
        raise OSError(number, os.strerror(number))
    assert (published / "llmc.json").read_text() == "old"
    assert names(published.parent) == ["bundle"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_place_that_cannot_be_written_is_a_usage_error(target, monkeypatch, number):
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match=rf"cannot be written \({os.strerror(number)}\); choose another"):
        publish(target, "new")


BYTES = os.fsdecode(b"b\xffd")
NO_FOLDERS = {
    BYTES: r"b\\udcffd is not UTF-8",
    f"{BYTES}/below": "is not UTF-8",
    "link": "is not UTF-8",
    "loop": "is a link to itself",
    "x" * 300: r"cannot be written \(File name too long\)",
    "pipe": "exists; choose another output folder",
    "pipe/below": r"cannot be written \(Not a directory\)",
}


@pytest.mark.threat("wrong-paths")
@pytest.mark.parametrize(("name", "sentence"), NO_FOLDERS.items(), ids=[ascii(name)[:12] for name in NO_FOLDERS])
def test_a_name_for_no_folder_is_refused_before_any_work(tmp_path, name, sentence):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(BYTES)
    before = names(tmp_path)
    with pytest.raises(UsageError, match=sentence), staging_folder(tmp_path / name):
        raise AssertionError("no work was to be done")
    assert names(tmp_path) == before


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "I/O error")])
def test_a_failure_in_the_swap_itself_brings_the_old_folder_back(published, monkeypatch, failing, error):
    """Renames: the old folder aside, the new one in, and after a failure the old one back."""
    rename, calls = Path.rename, []

    def interrupted(self: Path, to: Path) -> Path:
        calls.append(to)
        if len(calls) == failing:
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, UsageError)):
        publish(published, "new", force=True)
    assert (published / "llmc.json").read_text() == "old"
    assert names(published.parent) == ["bundle"]


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint"])
def test_force_does_not_replace_a_folder_that_holds_something_else(tmp_path, name):
    target = tmp_path / "bundle"
    target.mkdir()
    (target / bundle.BUNDLE_MANIFEST).write_text("{}")
    kept = target / name
    kept.mkdir() if name == "checkpoint" else kept.write_text("mine")
    with pytest.raises(UsageError, match=f"also holds '{name}'"), staging_folder(target, force=True):
        raise AssertionError("nothing may be written")
    assert kept.exists()
