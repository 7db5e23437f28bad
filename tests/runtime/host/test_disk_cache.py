"""The cache shows whole entries only, keeps to its bound, and is never needed."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmc.runtime.host import disk_cache

ROOT = Path(__file__).parents[3]
LONG_AGO = 2 * disk_cache.RECENT_S


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "root"))
    monkeypatch.setattr(disk_cache, "_used", set())
    return tmp_path / "root"


def aged(path: Path, age: float) -> Path:
    """The same path, last changed ``age`` seconds ago."""
    os.utime(path, (time.time() - age,) * 2)
    return path


def filled(root: Path, key: str, size: int, age: float, kind: str = "kind") -> Path:
    """An entry that another process made ``age`` seconds ago."""
    folder = root / kind / key
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(bytes(size))
    return aged(folder, age)


def test_the_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert disk_cache.cache_root() == tmp_path / "root"
    monkeypatch.delenv("LLMC_CACHE")
    assert disk_cache.cache_root() == Path("/xdg/llmc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.cache_root() == Path("/home/me/.cache/llmc")
    monkeypatch.setenv("LLMC_CACHE", "here")
    assert disk_cache.cache_root() == Path.cwd() / "here"


def test_an_account_without_a_home_has_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.delenv("LLMC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without HOME and without an entry of the user
    path = disk_cache.entry("kind", "key")
    path.mkdir(parents=True)
    assert not path.is_relative_to(disk_cache.cache_root())


def test_a_file_appears_when_it_is_whole_and_an_error_leaves_nothing(root):
    file = root / "state.npz"
    root.mkdir()
    with pytest.raises(OSError, match="No space left"), disk_cache.write_entry(file) as staging:
        staging.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(root.iterdir()) == []
    with disk_cache.write_entry(file) as staging:
        staging.write_text("all")
        assert not file.exists()
    assert (file.read_text(), list(root.iterdir())) == ("all", [file])


def test_pruning_removes_the_least_recently_used_until_the_rest_fits(root):
    old, older, oldest = (filled(root, str(age), 100, age * LONG_AGO) for age in (1, 2, 3))
    disk_cache.prune("kind", 2 * (100 + disk_cache.ENTRY_BYTES))
    assert (old.exists(), older.exists(), oldest.exists()) == (True, True, False)
    disk_cache.prune("kind", 99)
    assert not old.exists()
    assert not older.exists()


def test_what_another_process_holds_stays_until_it_ends(root):
    held, other = (filled(root, key, 100, LONG_AGO) for key in ("held", "other"))
    code = f"import sys; from llmc.runtime.host.disk_cache import Hold, Path; hold = Hold(Path({str(held)!r}));"
    command = [sys.executable, "-c", code + "print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        disk_cache.prune("kind", 0)
        assert (held.exists(), other.exists()) == (True, False)
        holder.kill()
    disk_cache.prune("kind", 0)
    assert not held.exists()


KILLED = """
import os, signal
from llmc.runtime.host import disk_cache
entry = disk_cache.entry("calibration", "key")
entry.mkdir(parents=True)
(entry / "head.npz").touch()
with disk_cache.write_entry(entry / "state.npz") as staging:
    staging.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_wrote_is_cleared(root):
    assert subprocess.run([sys.executable, "-c", KILLED]).returncode == -signal.SIGKILL
    entry = root / "calibration" / "key"
    [left] = (path for path in entry.iterdir() if path.name.startswith(disk_cache.STAGING))
    disk_cache.prune("calibration", 10**9)
    assert left.exists()  # so young that it may not be locked yet
    for path in (left, entry):
        aged(path, LONG_AGO)
    disk_cache.prune("calibration", 10**9)
    assert [path.name for path in entry.iterdir()] == ["head.npz"]


def test_without_a_writable_folder_entries_are_temporary_and_one_warning_says_so(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "file" / "below"))
    entry = disk_cache.entry("kind", "key")
    disk_cache.keep_file(entry / "content", b"x", 10**9)
    assert disk_cache.read_file(entry / "content") == b"x"
    assert not entry.is_relative_to(tmp_path)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"the cache {tmp_path / 'file' / 'below'} cannot be written"
    ]
    disk_cache.remove(entry)
