"""Pages of files: asked for before they are read, so that the disk is busy meanwhile, and let go of afterwards."""

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from llmc.errors import ResourceError
from llmc.runtime.host import threads
from llmc.runtime.host.machine import available_memory
from llmc.strict import open_regular

# Bytes asked for at a time: Linux takes no more of a request than the disk's own read-ahead or its longest transfer,
# of which the smaller ones are about this size.
STEP = 256 << 10
# The part of the memory that is free that may be filled: more would push out what is still to be read.
SHARE = 0.5
# Between two calls that let go of what was read: a thread that packs weights reads some 15 MB meanwhile.
PAUSE_S = 0.01


@contextmanager
def read_ahead(path: Path) -> Iterator[None]:
    """Have the disk read a file into the page cache, from start to end, while the block runs.

    What is mapped is otherwise read where it is touched, and while something is computed nothing is read. A file that
    is missing, or larger than :data:`SHARE` of the memory that is available, is left alone.
    """

    def ask(ended: threading.Event) -> None:
        with suppress(OSError, ValueError), open_regular(path) as file:
            for start in range(0, os.fstat(file.fileno()).st_size, STEP):
                if ended.is_set():
                    return
                os.posix_fadvise(file.fileno(), start, STEP, os.POSIX_FADV_WILLNEED)

    if not _fits(path):
        yield
        return
    with _run_beside(ask, "llmc-read-ahead"):
        yield


@contextmanager
def read_once(file: mmap.mmap) -> Iterator[None]:
    """Let go of a mapped file's pages again and again while the block runs, which reads each about once: pages count as
    resident until then. They stay in the page cache."""

    def drop(ended: threading.Event) -> None:
        while not ended.wait(PAUSE_S):
            file.madvise(mmap.MADV_DONTNEED)

    with _run_beside(drop, "llmc-read-once"):
        yield
    file.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _run_beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``work`` in a thread until the block ends, which sets the event that ``work`` is given."""
    ended, thread = threading.Event(), None
    with suppress(ResourceError):  # no thread can be started: it only saves time or memory
        thread = threads.start(partial(work, ended), name, ended.set)
    try:
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join()


def _fits(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:  # whoever reads it says so
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= SHARE * available_memory()
