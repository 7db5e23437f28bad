"""The thread of an engine: it starts with the first message, runs step after step, and ends with the engine."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from llmc.errors import EngineClosedError, GpuError
from llmc.runtime.api.handle import is_serving, mark_serving
from llmc.runtime.host import threads

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EngineThread:
    """Runs ``step`` until the engine is closed and nothing is left to do. Other threads send it messages: functions,
    which ``step`` runs by :meth:`take`.

    Args:
        step: one round of work; waits for a message if there is nothing to do.
        is_busy: tells whether there is anything to do.
        recover: called with the error of a step that failed; the thread goes on.
        fail_all: ends all requests with an error, because the engine is closed.
        give_up: ends all requests with the error that ends the thread, which may be a lack of memory.
        free: frees what belongs to the engine; called once, last.
    """

    def __init__(
        self,
        step: Callable[[], None],
        *,
        is_busy: Callable[[], bool],
        recover: Callable[[BaseException], None],
        fail_all: Callable[[BaseException], None],
        give_up: Callable[[BaseException], None],
        free: Callable[[], None],
    ) -> None:
        self._step, self._is_busy, self._recover = step, is_busy, recover
        self._fail_all, self._give_up, self._free = fail_all, give_up, free
        self.lock = threading.RLock()  # the garbage collector may close an engine anywhere
        self.closing = False
        self.lost: GpuError | None = None
        self.thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._freed = False
        self._then: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread if it does not run yet; with :attr:`lock` held. EngineClosedError: the engine is closed."""
        if self.lost is not None:
            raise EngineClosedError(f"the engine is closed: {self.lost}")
        if self.closing:
            raise EngineClosedError("the engine is closed; load the bundle again")
        if self.thread is None:
            self.thread = threads.start(self._serve, "llmc-engine", self._stop)

    def post(self, message: Callable[[], object]) -> None:
        """Leave a message, if the thread runs or not. The garbage collector may do so anywhere: it takes no lock."""
        self._inbox.put(message)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` between two steps, and return or raise what it does. EngineClosedError: the engine is
        closed."""
        if threading.current_thread() is self.thread:  # a client's function, which would wait for itself
            return function()
        self.refuse_forked()
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  # handed to the caller
                done.set_exception(error)

        with self.lock:
            self.start()
            self.post(run)
        return done.result()

    def close(self, drain: bool, then: Callable[[], None] | None) -> None:
        """Stop, wait until the thread has ended, and call ``then`` after ``free``; with ``drain`` finish accepted
        requests first."""
        if os.getpid() != self._pid:  # in a forked process there is no thread to wait for
            return
        with self.lock:
            first, self.closing = not self.closing, True
            self._then = self._then or then
            thread, freed = self.thread, self._freed
        if freed:  # closed before, or stopped by itself
            self._call_then()
        elif thread is not None:
            self._stop(drain)
        elif first:
            self._finish()
        if thread is not None and not is_serving():  # a client's function or the garbage collector may close it
            thread.join()

    def refuse_forked(self) -> None:
        """Raise EngineClosedError in a forked process, before a lock is taken that a thread of the parent may hold."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "the engine's thread stayed in the process that this one was forked from; load here"
            )

    def _stop(self, drain: bool = False) -> None:
        """Make the thread end soon, without waiting for it."""
        with self.lock:
            self.closing = True
        self.post(lambda: None if drain else self._fail_all(EngineClosedError("the engine was closed")))

    # ------------------------------------------------------------------------------------------ the thread itself

    @property
    def has_message(self) -> bool:
        return not self._inbox.empty()

    def take(self, timeout: float | None) -> None:
        """Run the next message; wait for one up to ``timeout`` seconds, None: without end."""
        with suppress(queue.Empty):
            self._inbox.get(timeout=timeout)()

    def lose(self, error: BaseException) -> GpuError:
        """Note that the GPU is gone: no request is accepted any more, and the thread ends."""
        lost = GpuError(f"the GPU was lost ({error}); load the bundle again in a new process", lost=True)
        with self.lock:
            self.lost, self.closing = lost, True
        return lost

    def _serve(self) -> None:
        mark_serving()
        try:
            while not self.closing or self._is_busy() or self.has_message:
                try:
                    self._step()
                except BaseException as error:  # noqa: BLE001  # without this thread, clients would wait for ever
                    self._recover(error)
        except BaseException as error:  # noqa: BLE001  # nor could it recover: of no memory, say
            with self.lock:
                self.closing = True
            while self.has_message:  # requests, and functions that somebody waits for
                with suppress(BaseException):
                    self.take(0)
            self._give_up(error)
        self._finish()

    def _finish(self) -> None:
        self._free()
        self._call_then()

    def _call_then(self) -> None:
        with self.lock:
            self._freed = True
            then, self._then = self._then, None
        if then is None:
            return
        try:
            then()
        except GpuError as error:
            if self.lost is None and not error.lost:
                raise
            log.warning("what a lost GPU held could not be freed: %s", error)
