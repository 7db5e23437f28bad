"""Files asked for before they are read, so that the disk is busy while the processor is."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def read_ahead(path: Path) -> Iterator[None]:
    """Have the disk read a file into the page cache, from start to end, while the block runs.

    What is mapped is otherwise read where it is touched, and while something is computed nothing is read. A file that
    is missing, or larger than :data:`SHARE` of the memory that is available, is left alone.
    """
    ended = threading.Event()

    def ask() -> None:
        with suppress(OSError, ValueError), open_regular(path) as file:
            for start in range(0, os.fstat(file.fileno()).st_size, STEP):
                if ended.is_set():
                    return
                os.posix_fadvise(file.fileno(), start, STEP, os.POSIX_FADV_WILLNEED)

    thread = None
    if _fits(path):
        with suppress(ResourceError):  # no thread can be started: it is only advice
            thread = threads.start(ask, "llmc-read-ahead", ended.set)
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
