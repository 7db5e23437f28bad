"""Read pages of files ahead, so that the disk works meanwhile, and drop them after use."""

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

# Bytes per request: Linux reads no more than the disk's own read-ahead or longest transfer, and small ones are about
# this size.
STEP = 256 << 10
# Largest file to read ahead, as a part of free memory: more would push out pages that are still to be read.
SHARE = 0.5
# Seconds between two drops of pages: a thread that packs weights reads some 15 MB in this time.
PAUSE_S = 0.01


@contextmanager
def read_ahead(path: Path) -> Iterator[None]:
    """Let the disk read a file into the page cache, from start to end, while the block runs.

    A mapped file is otherwise read only when it is touched, and the disk idles during computation. A file that is
    missing, or larger than :data:`SHARE` of the available memory, is left alone.
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
    """Drop a mapped file's pages regularly during the block, which reads each about once; they stay in the cache."""

    def drop(ended: threading.Event) -> None:
        while not ended.wait(PAUSE_S):
            file.madvise(mmap.MADV_DONTNEED)

    with _run_beside(drop, "llmc-read-once"):
        yield
    file.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _run_beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``work`` in a thread; when the block ends, set the event that ``work`` received."""
    ended, thread = threading.Event(), None
    with suppress(ResourceError):  # no thread can be started: only time or memory is lost
        thread = threads.start(partial(work, ended), name, ended.set)
    try:
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join()


def _fits(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:  # the reader of the file reports it
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= SHARE * available_memory()
