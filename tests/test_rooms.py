"""What is on its way to a place: kept while its process lives, cleared away when it was killed."""

import fcntl
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doubles.folders import names, publish
from doubles.refusals import about

from llmc import publish as publishing
from llmc.errors import UsageError
from llmc.publish import staging_folder, work_folder

NUMBER = "0123456789abcdef"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture
def published(target: Path) -> Path:
    publish(target, "old")
    return target


def leave(target: Path, kind: str = "new") -> Path:
    """What a killed process leaves: a room with a half-written folder, or with one that was set aside."""
    folder = target.parent / f".{target.name}.{NUMBER}.work"
    (folder / kind).mkdir(parents=True)
    (folder / kind / "llmc.json").write_text("left")
    (folder / "lock").touch()
    return folder


def test_what_a_dead_process_left_is_removed(target):
    leave(target)
    publish(target, "new")
    assert names(target.parent) == ["bundle"]


def test_a_folder_set_aside_by_a_process_killed_in_the_swap_comes_back(target):
    (leave(target, "old") / "new").mkdir()
    with pytest.raises(UsageError, match="exists"):
        publish(target, "new")
    assert (target / "llmc.json").read_text() == "left"
    assert names(target.parent) == ["bundle"]


@pytest.mark.parametrize(
    "name",
    [
        ".bundle.backup",
        f".bundle.{NUMBER}.work.1",
        f".bundle.{NUMBER[1:]}.work",
        f".bundle.{NUMBER.upper()}.work",
        f".bundles.{NUMBER}.work",
        f".other.{NUMBER}.work",
    ],
)
def test_hidden_folders_of_others_are_left_alone(target, name):
    (target.parent / name).mkdir()
    (target.parent / name / "lock").touch()
    publish(target, "new")
    assert names(target.parent) == [name, "bundle"]


def test_a_folder_of_somebodys_that_has_no_lock_is_left_alone(target):
    folder = leave(target)
    (folder / "lock").unlink()
    publish(target, "new")
    assert (folder / "new" / "llmc.json").read_text() == "left"


def test_a_folder_of_somebodys_that_holds_anything_else_is_left_alone(target):
    folder = leave(target)
    (folder / "thesis.txt").touch()
    publish(target, "new")
    assert names(folder) == ["lock", "new", "thesis.txt"]


def test_what_was_replaced_and_half_removed_never_comes_back(published, monkeypatch):
    def stopped(folder: Path) -> None:
        (folder / "llmc.json").unlink()
        raise OSError(5, "Input/output error")  # as a kill: the rest stays

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stopped)
        publish(published, "new", force=True)
    rooms = [name for name in names(published.parent) if name != "bundle"]
    assert [names(published.parent / name) for name in rooms] == [["lock", "old"]]
    published.rename(published.with_name("moved"))
    publish(published, "newer")
    assert names(published.parent) == ["bundle", "moved"]
    assert (published / "llmc.json").read_text() == "newer"


def test_where_a_file_system_has_no_locks_work_goes_on_and_nothing_is_cleared_away(target, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    folder = leave(target)
    monkeypatch.setattr(fcntl, "flock", flock)
    publish(target, "new")
    assert names(target.parent) == [folder.name, "bundle"]


def test_two_that_write_to_one_place_leave_each_others_work_alone(target):
    with staging_folder(target) as first:
        (first / "llmc.json").write_text("first")
        with pytest.raises(UsageError, match="exists"), staging_folder(target) as second:
            (second / "llmc.json").write_text("second")
            publish(target, "third")
        assert (first / "llmc.json").read_text() == "first"
        shutil.rmtree(target)
    assert (target / "llmc.json").read_text() == "first"
    assert names(target.parent) == ["bundle"]


@pytest.mark.parametrize("held", [[], ["lock"]])
def test_a_room_that_somebody_is_about_to_lock_is_left_alone(target, held):
    folder = leave(target)
    shutil.rmtree(folder / "new")
    (folder / "lock").unlink()
    for name in held:
        (folder / name).touch()
    publish(target, "new")
    assert names(target.parent) == [folder.name, "bundle"]


def test_a_room_ends_with_its_block_and_so_do_the_parents_that_it_made(tmp_path):
    with work_folder(tmp_path / "a" / "b" / "bundle") as folder:
        (folder / "graph").write_text("much")
        assert names(folder) == ["graph"]
        assert tmp_path / "a" / "b" in folder.parents
    assert names(tmp_path) == []


def test_what_cannot_be_brought_back_is_not_removed(published, monkeypatch):
    """The disk fails while the folder is replaced: the next run finds the old one."""
    rename, calls = Path.rename, []

    def failing(self: Path, to: Path) -> Path:
        calls.append(to)
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(UsageError, check=about("output")):
            publish(published, "new", force=True)
        assert not published.exists()
    publishing.refuse_to_overwrite(published, force=False)
    with work_folder(published):
        assert (published / "llmc.json").read_text() == "old"
    assert names(published.parent) == ["bundle"]


WRITER = """
import signal, sys
from pathlib import Path
from llmc.publish import staging_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
with staging_folder(Path(sys.argv[1]), force=True) as folder:
    (folder / "llmc.json").write_text("theirs")
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has begun to write, and ends when its stdin does."""
    command = [sys.executable, "-c", WRITER, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", [interrupt, kill])
def test_a_real_process_that_is_stopped_leaves_the_old_folder(published, stop):
    with writer(published) as process:
        stop(process)
        process.wait()
    assert (published / "llmc.json").read_text() == "old"
    publish(published, "new", force=True)
    assert names(published.parent) == ["bundle"]


def test_what_a_living_process_writes_is_left_alone_until_it_is_done(published):
    with writer(published) as process:
        publish(published, "ours", force=True)
        assert len(names(published.parent)) == 2
        process.communicate()
        assert process.returncode == 0
    assert (published / "llmc.json").read_text() == "theirs"
    assert names(published.parent) == ["bundle"]
