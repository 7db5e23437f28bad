"""Weights gathered in huge pages: a step reads all of them, and the processor looks up 512 times fewer addresses."""

import ctypes
import errno
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmc.errors import ResourceError
from llmc.runtime.host import threads

Span = tuple[int, int]

COLLAPSE = 25  # Linux 6.1 calls it MADV_COLLAPSE
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# A place where less than this is in use would grow.
FULL = 0.9
# The first request is left alone; then the thread rests so many times as long as it works, since whoever reads a page
# that is being moved waits.
PAUSE_S, REST = 2.0, 4
# Weights of fewer bytes are left alone: the processor has the addresses of so many at hand.
LEAST = 64 << 20

# Private memory that may be written, and is no file's.
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 *(?:\[heap\])?\n")


def list_anonymous() -> list[Span]:
    """Addresses of this process's own memory, in order; none but on Linux."""
    with suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        return [_span(found) for found in map(_ANONYMOUS.fullmatch, lines) if found]
    return []


def gather_soon(before: Sequence[Span], weights: int) -> None:
    """Have the kernel gather what was allocated since ``before`` in huge pages, in a thread that takes its time;
    ``weights`` are its bytes. Where the kernel cannot, nothing happens."""
    if weights < LEAST or not PAGE_SIZE.exists():
        return
    stopped = threading.Event()
    with suppress(ResourceError):  # no thread can be started: it is only faster
        threads.start(partial(gather, before, stopped), "llmc-huge-pages", stopped.set)


def gather(before: Sequence[Span], stopped: threading.Event) -> None:
    """Gather it now, until there is no huge page left, or the memory is gone, or ``stopped``."""
    size, library = int(PAGE_SIZE.read_text()), ctypes.CDLL(None, use_errno=True)
    stopped.wait(PAUSE_S)
    for start, end in subtract(list(_list_full()), before):
        for address in range(-(-start // size) * size, end // size * size, size):
            began = time.monotonic()
            failed = library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), COLLAPSE)
            if failed and ctypes.get_errno() == errno.ENOMEM:
                return
            if stopped.wait(REST * (time.monotonic() - began)):
                return


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """What of ``spans`` is in none of the ``others``; both are in order."""
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
    span, size, lines = None, 0, ""
    with suppress(OSError):  # a kernel may not tell
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    for line in lines.splitlines(keepends=True):
        name, value = line.split(maxsplit=1)
        if "-" in name:
            found = _ANONYMOUS.fullmatch(line)
            span = _span(found) if found else None
        elif name == "Size:":
            size = int(value.split()[0])
        elif name == "Rss:" and span is not None and int(value.split()[0]) >= FULL * size:
            yield span


def _span(found: re.Match[str]) -> Span:
    return int(found[1], 16), int(found[2], 16)
