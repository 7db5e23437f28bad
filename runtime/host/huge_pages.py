"""Gather weights in huge pages: every step reads all weights, and the processor looks up 512 times fewer addresses."""

import ctypes
import errno
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmc.errors import ResourceError
from llmc.runtime.host import threads

Span = tuple[int, int]

NAME = "llmc-huge-pages"  # the thread's name
COLLAPSE = 25  # Linux 6.1 calls it MADV_COLLAPSE
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# Skip ranges with a smaller resident part: collapsing them would use more memory.
FULL = 0.9
# The first request is left alone. While other threads compute, this one rests for this many times its working time,
# because a thread that reads a page being moved waits: at 4 times, steps took 1.3 times as long.
PAUSE_S, REST = 2.0, 49
MOST_MISSED = 8  # ranges that were unmapped, or for which no huge page was free
BUSY = 0.5  # processors that other threads keep busy, from which on this one rests
# Fewer bytes of weights are left alone: the processor caches the addresses of that many.
LEAST = 64 << 20

# Writable private memory that belongs to no file.
_ANONYMOUS = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 *(?:\[heap\])?")


_gatherers: "weakref.WeakSet[threading.Event]" = weakref.WeakSet()


def _stop_all() -> None:
    for stopped in [*_gatherers]:
        stopped.set()


# Memory moved at that moment would no longer be shared with the child.
os.register_at_fork(before=_stop_all)


def list_anonymous() -> list[Span]:
    """Address ranges of this process's own memory, in order; empty except on Linux."""
    return [_span(match) for match in map(_ANONYMOUS.fullmatch, _read_lines("maps")) if match]


def note_others(weights: int) -> list[Span] | None:
    """:func:`list_anonymous` before weights are loaded; None if they are few, or the kernel cannot gather them."""
    return list_anonymous() if weights >= LEAST and PAGE_SIZE.exists() else None


def gather_soon(before: Sequence[Span] | None) -> None:
    """Let the kernel gather, in a slow background thread, the memory allocated since :func:`note_others`."""
    if before is None:
        return
    stopped = threading.Event()
    _gatherers.add(stopped)
    with suppress(ResourceError):  # no thread can be started: the weights are only read more slowly
        threads.start(partial(gather, before, stopped), NAME, stopped.set)


def settle() -> None:
    """Wait until everything is gathered, to measure a service as it runs after some seconds."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join()


def gather(before: Sequence[Span], stopped: threading.Event) -> None:
    """Gather until no huge page is left, or until ``stopped``."""
    size, library, other_threads = int(PAGE_SIZE.read_text()), ctypes.CDLL(None, use_errno=True), _Others()
    missed = 0
    if stopped.wait(PAUSE_S):
        return
    for start, end in subtract(list(_list_full()), before):
        if missed > MOST_MISSED:
            return
        for address in range(-(-start // size) * size, end // size * size, size):
            began = time.monotonic()
            failed = library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), COLLAPSE)
            if failed and ctypes.get_errno() == errno.ENOMEM:  # no huge page is free, or the memory was unmapped
                missed += 1
                break
            took = time.monotonic() - began
            if stopped.wait(REST * took if other_threads.measure() > BUSY else 0):
                return


class _Others:
    def __init__(self) -> None:
        self._clock = self._used = 0.0

    def measure(self) -> float:
        """Number of processors that other threads kept busy since the last call."""
        clock, used = time.monotonic(), time.process_time() - time.thread_time()
        busy = (used - self._used) / max(clock - self._clock, 1e-6)
        self._clock, self._used = clock, used
        return busy


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """The parts of ``spans`` outside all ``others``; both are in order."""
    for start, end in spans:
        for hole, its_end in others:
            if hole < end and its_end > start:
                if start < hole:
                    yield start, hole
                start = its_end
        if start < end:
            yield start, end


def _list_full() -> Iterator[Span]:
    """Anonymous ranges that are resident, up to a few pages."""
    span, size = None, 0
    for line in _read_lines("smaps"):
        name, _, value = line.partition(b" ")
        if b"-" in name:
            match = _ANONYMOUS.fullmatch(line)
            span = _span(match) if match else None
        elif name == b"Size:":
            size = int(value.split()[0])
        elif name == b"Rss:" and span is not None and int(value.split()[0]) >= FULL * size:
            yield span


def _read_lines(name: str) -> list[bytes]:
    """Lines of the kernel's file about this process; empty if there is none. File names in it may be any bytes."""
    with suppress(OSError):
        return Path("/proc/self", name).read_bytes().split(b"\n")
    return []


def _span(found: re.Match[bytes]) -> Span:
    return int(found[1], 16), int(found[2], 16)
