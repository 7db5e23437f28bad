"""Weights gathered in huge pages: a step reads all of them, and the processor looks up 512 times fewer addresses."""

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

NAME = "llmc-huge-pages"  # of the thread
COLLAPSE = 25  # Linux 6.1 calls it MADV_COLLAPSE
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# A place where less than this is in use would grow.
FULL = 0.9
# The first request is left alone. While others compute, the thread rests so many times as long as it works, for whoever
# reads a page that is being moved waits: with 4 times steps took 1.3 times as long.
PAUSE_S, REST = 2.0, 49
MOST_MISSED = 8  # places that were gone, or for which there was no page
BUSY = 0.5  # processors that others in this process keep busy then
# Weights of fewer bytes are left alone: the processor has the addresses of so many at hand.
LEAST = 64 << 20

# Private memory that may be written, and is no file's.
_ANONYMOUS = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 *(?:\[heap\])?")


_gatherers: "weakref.WeakSet[threading.Event]" = weakref.WeakSet()


def _stop_all() -> None:
    for stopped in [*_gatherers]:
        stopped.set()


# What is moved then would no longer be shared with the child.
os.register_at_fork(before=_stop_all)


def list_anonymous() -> list[Span]:
    """Addresses of this process's own memory, in order; none but on Linux."""
    return [_span(found) for found in map(_ANONYMOUS.fullmatch, _read_lines("maps")) if found]


def note_others(weights: int) -> list[Span] | None:
    """:func:`list_anonymous` before so many bytes of weights come; None where these are left alone, or the kernel
    cannot gather them."""
    return list_anonymous() if weights >= LEAST and PAGE_SIZE.exists() else None


def gather_soon(before: Sequence[Span] | None) -> None:
    """Have the kernel gather what was allocated since :func:`note_others` in huge pages, in a thread that takes its
    time."""
    if before is None:
        return
    stopped = threading.Event()
    _gatherers.add(stopped)
    with suppress(ResourceError):  # no thread can be started: it is only faster
        threads.start(partial(gather, before, stopped), NAME, stopped.set)


def settle() -> None:
    """Wait until all is gathered, to measure what a service does that is up for some seconds."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join()


def gather(before: Sequence[Span], stopped: threading.Event) -> None:
    """Gather it now, until there is no huge page left, or ``stopped``."""
    size, library, others = int(PAGE_SIZE.read_text()), ctypes.CDLL(None, use_errno=True), _Others()
    missed = 0
    if stopped.wait(PAUSE_S):
        return
    for start, end in subtract(list(_list_full()), before):
        if missed > MOST_MISSED:
            return
        for address in range(-(-start // size) * size, end // size * size, size):
            began = time.monotonic()
            failed = library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), COLLAPSE)
            if failed and ctypes.get_errno() == errno.ENOMEM:  # none is free, or the memory is gone
                missed += 1
                break
            took = time.monotonic() - began
            if stopped.wait(REST * took if others.measure() > BUSY else 0):
                return


class _Others:
    """The other threads of this process."""

    def __init__(self) -> None:
        self._clock = self._used = 0.0

    def measure(self) -> float:
        """Processors that they kept busy since the last call."""
        clock, used = time.monotonic(), time.process_time() - time.thread_time()
        found = (used - self._used) / max(clock - self._clock, 1e-6)
        self._clock, self._used = clock, used
        return found


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Those parts of ``spans`` that are in none of the ``others``; both are in order."""
    for start, end in spans:
        for other, its_end in others:
            if other < end and its_end > start:
                if start < other:
                    yield start, other
                start = its_end
        if start < end:
            yield start, end


def _list_full() -> Iterator[Span]:
    """Those of the anonymous addresses that are in use, all but a few."""
    span, size = None, 0
    for line in _read_lines("smaps"):
        name, _, value = line.partition(b" ")
        if b"-" in name:
            found = _ANONYMOUS.fullmatch(line)
            span = _span(found) if found else None
        elif name == b"Size:":
            size = int(value.split()[0])
        elif name == b"Rss:" and span is not None and int(value.split()[0]) >= FULL * size:
            yield span


def _read_lines(name: str) -> list[bytes]:
    """Lines of what the kernel tells of this process; none where it does not. Names of files may be any bytes."""
    with suppress(OSError):
        return Path("/proc/self", name).read_bytes().split(b"\n")
    return []


def _span(found: re.Match[bytes]) -> Span:
    return int(found[1], 16), int(found[2], 16)
