"""The cache shows whole entries only, keeps to its bound, and is never needed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmc.runtime import cache

LONG_AGO = 2 * cache.RECENT_S


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "root"))
    monkeypatch.setattr(cache, "_used", set())
    return tmp_path / "root"


def filled(root: Path, key: str, size: int, age: float) -> Path:
    """An entry that another process made ``age`` seconds ago."""
    folder = root / "kind" / key
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(bytes(size))
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_the_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.cache_root() == tmp_path / "root"
    monkeypatch.delenv("LLMC_CACHE")
    assert cache.cache_root() == Path("/xdg/llmc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path("/home/me/.cache/llmc")


def test_an_entry_appears_when_it_is_whole(root: Path):
    entry = cache.entry("kind", "key")
    with cache.published(entry) as folder:
        (folder / "content").write_text("all")
        assert not entry.exists()
    assert (entry / "content").read_text() == "all"
    assert list(entry.parent.iterdir()) == [entry]


def test_an_error_leaves_nothing():
    entry = cache.entry("kind", "key")
    with pytest.raises(OSError, match="No space left"), cache.published(entry) as folder:
        (folder / "content").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(entry.parent.iterdir()) == []


def test_a_disk_that_fills_while_syncing_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    entry = cache.entry("kind", "key")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), cache.published(entry) as folder:
        (folder / "content").write_text("half")
    assert list(entry.parent.iterdir()) == []


def test_the_first_of_two_that_publish_one_entry_wins():
    entry = cache.entry("kind", "key")
    with cache.published(entry) as late:
        (late / "content").write_text("second")
        with cache.published(entry) as early:
            (early / "content").write_text("first")
    assert (entry / "content").read_text() == "first"
    assert list(entry.parent.iterdir()) == [entry]


RACE = """
from llmc.runtime import cache
for i in range(20):
    entry = cache.entry("kind", str(i))
    with cache.published(entry) as folder:
        for name in "abc":
            (folder / name).write_text(str(i))
    assert sorted(file.name for file in entry.iterdir()) == ["a", "b", "c"]
"""


def test_processes_that_race_end_well(root: Path):
    racers = [subprocess.Popen([sys.executable, "-c", RACE]) for _ in range(2)]
    assert [racer.wait(120) for racer in racers] == [0, 0]
    assert sorted(path.name for path in (root / "kind").iterdir()) == sorted(map(str, range(20)))


def test_a_removed_entry_is_gone():
    entry = cache.entry("kind", "key")
    with cache.published(entry) as folder:
        (folder / "content").write_text("x")
    cache.remove(entry)
    cache.remove(entry)
    assert list(entry.parent.iterdir()) == []


def test_pruning_removes_the_least_recently_used_until_the_rest_fits(root: Path):
    old, older, oldest = (filled(root, str(age), 100, age * LONG_AGO) for age in (1, 2, 3))
    cache.prune("kind", 250)
    assert (old.exists(), older.exists(), oldest.exists()) == (True, True, False)
    cache.prune("kind", 99)
    assert not old.exists()
    assert not older.exists()


def test_pruning_counts_entries_that_are_files(root: Path):
    file = filled(root, "folder", 10, 0).parent / "file"
    file.write_bytes(bytes(100))
    os.utime(file, (time.time() - LONG_AGO,) * 2)
    cache.prune("kind", 50)
    assert not file.exists()


def test_asking_for_an_entry_makes_it_recent(root: Path, monkeypatch: pytest.MonkeyPatch):
    asked, other = (filled(root, key, 100, LONG_AGO) for key in ("asked", "other"))
    assert cache.entry("kind", "asked") == asked
    monkeypatch.setattr(cache, "_used", set())  # as another process sees it
    cache.prune("kind", 0)
    assert (asked.exists(), other.exists()) == (True, False)


def test_pruning_spares_what_this_process_uses_however_long_ago_it_asked(root: Path):
    mine = filled(root, "mine", 100, 0)
    cache.entry("kind", "mine")
    os.utime(mine, (0, 0))
    cache.prune("kind", 0)
    assert mine.exists()


def test_pruning_clears_what_a_killed_process_left(root: Path):
    young, old = (
        filled(root, f"{cache.STAGING}{key}", 1, age) for key, age in (("a", 60), ("b", cache.ABANDONED_S + 9))
    )
    cache.prune("kind", 100)
    assert (young.exists(), old.exists()) == (True, False)


def test_pruning_an_absent_kind_does_nothing(root: Path):
    cache.prune("nothing", 0)
    assert not (root / "nothing").exists()


def test_without_a_writable_folder_entries_are_temporary_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "file" / "below"))
    assert not cache.writable()
    entry = cache.entry("kind", "key")
    with cache.published(entry) as folder:
        (folder / "content").write_text("x")
    assert entry.is_dir()
    assert not entry.is_relative_to(tmp_path)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"the cache {tmp_path / 'file' / 'below'} cannot be written"
    ]
    cache.remove(entry)
