"""llmc's own threads, which are stopped and joined before Python ends.

A thread that returns from a C++ library while Python ends aborts the process
(https://github.com/python/cpython/issues/87135), so no thread may be inside one by then. The threads are daemons, which
:mod:`atexit` stops after the application's own threads have ended. ``ThreadPoolExecutor`` does not help: it accepts no
work after the main thread has ended, and Python's end waits for its threads without limit.
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

# A step takes milliseconds, so requests usually end by themselves within this time. Longer calls of a library are
# interrupted if it can do that: ONNX Runtime on the CPU stops before the next node of a graph.
GRACE_S = 1.0
# At its end Python waits this long for all threads together. A longer call, of a client's function or of a library that
# cannot be interrupted, is left running; the process still ends with SIGABRT if it is inside the library then.
EXIT_S = 10.0

_running: dict[threading.Thread, Callable[[], object]] = {}  # thread: function that stops it
_interrupts: weakref.WeakKeyDictionary[object, Callable[[], object]] = weakref.WeakKeyDictionary()
_leaving = False


def start(target: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> threading.Thread:
    """Start a thread that ends before Python does; ``stop`` makes ``target`` return soon.
    Raises ResourceError: no thread can be started."""

    def run() -> None:
        try:
            target()
        finally:
            _running.pop(threading.current_thread(), None)

    if _leaving:
        raise ResourceError(f"the thread {name} cannot be started: Python is ending; start it earlier")
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException as error:
        _running.pop(thread, None)
        if not isinstance(error, RuntimeError | MemoryError):
            raise
        raise ResourceError(
            f"the thread {name} cannot be started ({error}); end other threads or processes, or raise their limit, and "
            "try again"
        ) from error
    return thread


def on_leaving(owner: object, interrupt: Callable[[], object]) -> None:
    """Call ``interrupt`` if ``owner`` keeps a thread busy when Python ends; it must not reference its owner."""
    _interrupts[owner] = interrupt


@atexit.register
def _leave() -> None:
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
        log.warning("%s did not end within %g s; the process ends without it", thread.name, EXIT_S)


def _join(deadline: float) -> list[threading.Thread]:
    """Join threads; return those that still run at the deadline."""
    left = [*_running]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in left if thread.is_alive()]


os.register_at_fork(after_in_child=_running.clear)  # a forked process has none of these threads
