"""Threads of llmc's own, told to end and waited for before Python ends.

A thread that comes out of a C++ library while Python ends aborts the process
(https://github.com/python/cpython/issues/87135), so none may be in one by then. The threads are daemons, which
:mod:`atexit` stops once the application's own threads have ended. ``ThreadPoolExecutor`` is of no use: it takes no work
once the main thread has ended, and Python's end waits for its threads however long they take.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from llmc.errors import ResourceError

log = logging.getLogger(__name__)

# A step takes milliseconds, so requests usually end by themselves within this time. Calls of the library that take
# longer are interrupted where the library can do that: ONNX Runtime on the CPU stops before the next node of a graph.
GRACE_S = 1.0
# Python's end waits so long for all threads together. What takes longer, a client's function or a call of a library
# that cannot be interrupted, is left to the end of the process, which is still SIGABRT if the library is left then.
EXIT_S = 10.0

_running: dict[threading.Thread, Callable[[], object]] = {}  # and what tells it to end
_interrupts: weakref.WeakKeyDictionary[object, Callable[[], object]] = weakref.WeakKeyDictionary()
_leaving = False


def start(target: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> threading.Thread:
    """Start a thread that ends before Python does; ``stop`` makes ``target`` return soon, if nobody else does.
    Raises ResourceError: no thread can be started."""

    def run() -> None:
        try:
            target()
        finally:
            _running.pop(threading.current_thread(), None)

    if _leaving:
        raise ResourceError(f"the thread {name} cannot be started any more: Python is ending; do it earlier")
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException as error:
        _running.pop(thread, None)
        if not isinstance(error, RuntimeError | MemoryError):
            raise
        raise ResourceError(
            f"the thread {name} cannot be started ({error}); end other threads or processes, or raise the limit on "
            "them, and try again"
        ) from error
    return thread


def on_leaving(owner: object, interrupt: Callable[[], object]) -> None:
    """Have ``interrupt`` called if ``owner`` keeps a thread busy when Python ends; it must not hold its owner."""
    _interrupts[owner] = interrupt


@atexit.register
def _leave() -> None:
    """Tell all threads to end, and wait until they have."""
    global _leaving
    _leaving = True
    for stop in [*_running.values()]:
        stop()
    began = time.monotonic()
    if not _join(began + min(GRACE_S, EXIT_S)):
        return
    for interrupt in [*_interrupts.values()]:
        interrupt()
    for thread in _join(began + EXIT_S):
        log.warning("%s did not end within %g s and is left to the end of the process", thread.name, EXIT_S)


def _join(deadline: float) -> list[threading.Thread]:
    """Those that still run at the deadline."""
    left = [*_running]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in left if thread.is_alive()]


os.register_at_fork(after_in_child=_running.clear)  # in a forked process there are none of them
