"""Files asked for before they are read: all of a file, in order, as long as the block runs, and only where it fits; and
let go of afterwards."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.runtime.host import read_ahead as room
from llmc.runtime.host.read_ahead import SHARE, STEP, read_ahead, read_once

PATIENCE_S = 30.0
Asked = list[tuple[int, int]]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Replace the system's advice by one that notes what was asked for, after calling ``each``."""

    def replace(each: Callable[[], object] = lambda: None) -> Asked:
        asked: Asked = []

        def advise(descriptor: int, start: int, length: int, advice: int) -> None:
            each()
            assert advice == 3 and os.fstat(descriptor).st_size > start  # 3: what Linux calls POSIX_FADV_WILLNEED
            asked.append((start, length))

        monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
        return asked

    return replace


def file_of(folder: Path, size: int) -> Path:
    path = folder / "weights.bin"
    path.write_bytes(b"\0")
    os.truncate(path, size)
    return path


def ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "llmc-read-ahead":
            thread.join(PATIENCE_S)


def test_all_of_a_file_is_asked_for_from_start_to_end(advised, tmp_path):
    asked = advised()
    with read_ahead(file_of(tmp_path, 3 * STEP + 5)):
        ended()
    assert asked == [(0, STEP), (STEP, STEP), (2 * STEP, STEP), (3 * STEP, STEP)]


def test_nothing_is_asked_for_once_the_block_has_ended(advised, monkeypatch, tmp_path):
    first, told = threading.Event(), threading.Event()

    class Ended(threading.Event):
        def set(self) -> None:
            super().set()
            told.set()

    def wait() -> None:
        first.set()
        assert told.wait(PATIENCE_S)

    asked = advised(wait)
    monkeypatch.setattr(room, "threading", SimpleNamespace(Event=Ended))
    with pytest.raises(KeyError), read_ahead(file_of(tmp_path, 100 * STEP)):
        assert first.wait(PATIENCE_S)
        raise KeyError
    assert len(asked) == 1
    assert "llmc-read-ahead" not in {thread.name for thread in threading.enumerate()}


def test_a_file_that_would_fill_the_memory_is_left_alone(advised, monkeypatch, tmp_path):
    asked = advised()
    path = file_of(tmp_path, STEP)
    for free, steps in ((STEP / SHARE - 1, 0), (STEP / SHARE, 1)):
        monkeypatch.setattr(room, "available_memory", lambda free=free: free)
        with read_ahead(path):
            ended()
        assert len(asked) == steps


def resident(path: Path) -> int:
    """Kilobytes of a mapped file's pages that count as this process's."""
    _, _, found = Path("/proc/self/smaps").read_text().partition(str(path))
    return int(found.split("\nRss:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not tell")
def test_pages_of_a_mapped_file_are_let_go_of_while_it_is_read_and_can_be_read_again(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(content := os.urandom(STEP))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == content and resident(path) == STEP // 1024
        with read_once(mapped):
            deadline = time.monotonic() + PATIENCE_S
            while resident(path) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert resident(path) == 0
            assert mapped[:] == content
        assert resident(path) == 0
