"""Huge pages: what a load allocated is gathered in them, and nothing else; the bytes stay what they were."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.host import huge_pages as room
from llmc.runtime.host.huge_pages import LEAST, PAGE_SIZE, gather, gather_soon, list_anonymous, note_others, subtract

MB = 1 << 20


class Place:
    """Anonymous memory of the kernel's, with no huge page in it yet, and its address."""

    def __init__(self, size: int) -> None:
        self.mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.mapped, np.uint8)
        self.span = self.bytes.ctypes.data, self.bytes.ctypes.data + size

    def huge(self) -> int:
        """Bytes of huge pages in the mappings that this place is in."""
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *rest = line.split()
            if "-" in name and ":" not in name:
                start, end = (int(part, 16) for part in name.split("-"))
                inside = start < self.span[1] and end > self.span[0]
            elif name == "AnonHugePages:" and inside:
                found += int(rest[0]) * 1024
        return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PAUSE_S", 0.0)
    monkeypatch.setattr(room, "REST", 0)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A filled place that is the only full one; skipped where the kernel has no huge pages to gather in."""
    if not PAGE_SIZE.exists():
        pytest.skip("this kernel has no huge pages")
    filled = Place(16 * MB)
    filled.mapped.madvise(mmap.MADV_NOHUGEPAGE)
    filled.bytes[:] = np.arange(16 * MB, dtype=np.uint64).astype(np.uint8)
    filled.mapped.madvise(mmap.MADV_HUGEPAGE)
    full = list(room._list_full())
    assert any(start <= filled.span[0] and filled.span[1] <= end for start, end in full)
    monkeypatch.setattr(room, "_list_full", lambda: iter([filled.span]))
    return filled


def test_what_was_allocated_since_is_gathered_and_keeps_its_bytes(place):
    checked = place.bytes.copy()
    gather([], threading.Event())
    if not place.huge():
        pytest.skip("this kernel gathers nothing when asked (Linux before 6.1), or has no huge page left")
    assert place.huge() >= 8 * MB
    assert np.array_equal(place.bytes, checked)


def test_what_was_there_before_is_left_alone(place):
    gather([place.span], threading.Event())
    assert place.huge() == 0


def test_it_stops_when_it_is_told_to(place):
    stopped = threading.Event()
    stopped.set()
    gather([], stopped)
    assert place.huge() <= 2 * MB


def test_memory_that_is_reserved_and_not_in_use_is_not_full():
    reserved = Place(64 * MB)
    reserved.bytes[: 32 * MB] = 1
    assert reserved.span not in list(room._list_full())


def test_it_rests_while_others_compute(place, monkeypatch):
    rests = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout)
            return len(rests) > 4

    monkeypatch.setattr(room, "REST", 10**6)
    busy = iter((0.0, 1.9, 0.1, 1.9))
    monkeypatch.setattr(room._Others, "measure", lambda self: next(busy))
    gather([], Stopped())
    assert [bool(rest) for rest in rests[1:]] == [False, True, False, True]


def test_what_others_compute_is_measured():
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    others = room._Others()
    others.measure()
    time.sleep(0.2)
    assert others.measure() < room.BUSY
    thread = threading.Thread(target=compute)
    thread.start()
    used = -time.thread_time() + time.process_time()
    while time.process_time() - time.thread_time() < used + 0.2:
        time.sleep(0.01)
    found = others.measure()
    done.set()
    thread.join()
    assert found > 0.1  # on a machine that has other work, too


def test_memory_that_went_meanwhile_does_not_end_it(place, monkeypatch):
    gone = Place(64 * MB).span  # unmapped at once
    monkeypatch.setattr(room, "_list_full", lambda: iter([gone, place.span]))
    gather([], threading.Event())
    if not place.huge():
        pytest.skip("this kernel gathers nothing when asked (Linux before 6.1), or has no huge page left")


def test_it_ends_where_no_page_is_free(monkeypatch):
    gone, left = Place(64 * MB).span, iter(range(100))
    monkeypatch.setattr(room, "subtract", lambda spans, others: (gone for _ in left))
    gather([], threading.Event())
    assert len(list(left)) == 100 - room.MOST_MISSED - 2


def test_a_fork_ends_it(monkeypatch):
    started = threading.Event()
    monkeypatch.setattr(room, "gather", lambda before, stopped: (started.set(), stopped.wait(30)))
    gather_soon([])
    assert started.wait(30)
    [thread] = [thread for thread in threading.enumerate() if thread.name == room.NAME]
    if not os.fork():
        os._exit(0)
    os.wait()
    thread.join(30)
    assert not thread.is_alive()


def test_names_of_mapped_files_are_any_bytes(tmp_path):
    path = tmp_path / "a\u2028b-\r c"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        assert list_anonymous()
        list(room._list_full())


def test_small_models_are_left_alone_and_nothing_is_read_for_them(monkeypatch):
    read, started = [], []
    monkeypatch.setattr(room, "_read_lines", lambda name: read.append(name) or [])
    monkeypatch.setattr(room.threads, "start", lambda *given: started.append(given))
    gather_soon(note_others(LEAST - 1))
    assert read == started == []
    gather_soon(note_others(LEAST))
    assert (read == ["maps"]) == bool(started) == PAGE_SIZE.exists()


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(10, 20), (30, 40)]),
        ([(0, 10), (20, 30)], [(10, 20), (30, 40)]),
        ([(5, 12), (18, 33)], [(12, 18), (33, 40)]),
        ([(12, 14), (15, 16)], [(10, 12), (14, 15), (16, 20), (30, 40)]),
        ([(0, 50)], []),
    ],
)
def test_addresses_without_others(others, left):
    assert list(subtract([(10, 20), (30, 40)], others)) == left


def test_anonymous_memory_is_listed():
    mine = Place(4 * MB)
    assert any(start <= mine.span[0] and mine.span[1] <= end for start, end in list_anonymous())
