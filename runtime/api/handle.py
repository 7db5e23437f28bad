"""A request's other end: wait for it, read it as it comes, or cancel it, from any thread or event loop."""

import asyncio
import copy
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llmc.errors import EngineClosedError, UsageError
from llmc.runtime.api.results import Delta, GenerationResult

_SERVING = threading.local()


def mark_serving() -> None:
    """Mark this thread as serving requests: if it waited for one, it would wait forever."""
    _SERVING.on = True


def is_serving() -> bool:
    return getattr(_SERVING, "on", False)


class Waiter:
    """Lets a task wait repeatedly for events of other threads. Create it on the event loop that waits.

    Events between two waits are remembered. A wait may end without an event.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Signal an event; from any thread."""
        with suppress(RuntimeError):  # the loop was closed, so no task waits
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self) -> None:
        await self._news.wait()
        self._news.clear()


class OutputCollector:
    """Carries a request's output from the engine's thread to its reader: pieces, then a result or an error.

    In a forked process nothing more arrives: a finished output can be read, everything else is refused.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._make_lock()
        self._deltas: deque[Delta] = deque()
        self._taking = 0  # threads that wait for a piece
        self._readers: list[Waiter] = []  # tasks that wait for a piece or the end
        self._waiters: list[Waiter] = []  # tasks that wait for the end
        self.result: GenerationResult | None = None
        self.error: BaseException | None = None

    def _make_lock(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._over = threading.Condition(self._lock)  # separate, so that pieces do not wake waits for the end

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    def put(self, delta: Delta) -> None:
        with self._lock:
            self._deltas.append(delta)
            if self._taking:
                self._changed.notify_all()
            for reader in self._readers:
                reader.wake()

    def end(self, result: GenerationResult | None, error: BaseException | None = None) -> None:
        """Close with a result or an error; only the first call counts."""
        with self._lock:
            if not self.ended:
                self.result, self.error = result, error
                self._changed.notify_all()
                self._over.notify_all()
                for waiter in (*self._readers, *self._waiters):
                    waiter.wake()

    def take(self, timeout: float | None = None) -> Delta | None:
        """Wait for the next piece; None at the end. Raises TimeoutError after ``timeout`` seconds without one."""
        self.refuse_forked()
        with self._lock:
            self._taking += 1
            try:
                if not self._wait(self._changed, lambda: bool(self._deltas) or self.ended, timeout):
                    raise TimeoutError(f"nothing came within {timeout} s; the request goes on")
            finally:
                self._taking -= 1
            return self._deltas.popleft() if self._deltas else None

    def poll(self) -> Delta | None:
        """The next piece if there is one, without waiting."""
        self.refuse_forked()
        with self._lock:
            return self._deltas.popleft() if self._deltas else None

    def wait(self, timeout: float | None) -> None:
        """Wait for the end. Raises TimeoutError after ``timeout`` seconds."""
        self.refuse_forked()
        with self._lock:
            if not self._wait(self._over, lambda: self.ended, timeout):
                raise TimeoutError(f"the request did not end within {timeout} s; it goes on")

    @contextmanager
    def wait_for_pieces(self, pieces: bool) -> Iterator[Waiter]:
        """A waiter for the running event loop's task while the block runs: for the end, or for ``pieces``, too."""
        self.refuse_forked()
        waiter, waiters = Waiter(), self._readers if pieces else self._waiters
        with self._lock:
            waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                waiters.remove(waiter)

    def refuse_forked(self) -> None:
        """Raise EngineClosedError in a forked process that has not ended, before it takes a lock of the parent."""
        if os.getpid() == self._pid:
            return
        if not self.ended:
            raise EngineClosedError(
                "the engine's thread stayed in the process that this one was forked from; wait for the request there"
            )
        self._pid = os.getpid()
        self._make_lock()

    def _wait(self, changed: threading.Condition, holds: Callable[[], bool], timeout: float | None) -> bool:
        if is_serving() and not holds():
            raise UsageError(
                "request",
                "is waited for by a function of a request, on the thread that computes requests",
                "wait in another thread",
            )
        endless = timeout is not None and timeout > threading.TIMEOUT_MAX
        return changed.wait_for(holds, None if endless else timeout)


class Handle:
    """A submitted request. Any thread may use it; several readers share its pieces among them.

    Iterating yields text as it becomes final; ``events()`` yields every piece of every output; ``result()`` waits for
    the end. All three also work with ``async for`` and ``await``. Dropping the handle before the end cancels the
    request, unless it has an ``on_delta``. In a forked process a finished request can be read; everything else raises
    EngineClosedError.
    """

    def __init__(self, collector: OutputCollector, cancel: Callable[[], None], outputs: int, keep: bool) -> None:
        self._collector = collector
        self._cancel = cancel
        self._cancelled = False
        self.owner: object = None
        """The model, which must live while a reader reads."""
        self.prompt_tokens = 0
        """Tokens of the prompt as fed, after any truncation; the engine fills it in."""
        self.most_tokens = 0
        """Most tokens of the prompt and of all outputs; the engine fills it in."""
        self.generated: Callable[[], int] = int
        """Returns the number of tokens of all outputs so far; the engine fills it in."""
        self.is_waiting: Callable[[], bool] = bool
        """Returns True while the request is queued; the engine fills it in."""
        self.outputs = outputs
        """Number of outputs that the request asked for."""
        self.token_ids: list[int] = []
        """Tokens of the first output that have been read."""
        self._finalizer = None if keep else weakref.finalize(self, cancel)
        if self._finalizer is not None:
            self._finalizer.atexit = False

    @property
    def done(self) -> bool:
        """True once the request has ended, for whatever reason."""
        return self._collector.ended

    def cancel(self) -> bool:
        """Stop the request; its cache row is free after the engine's current step. False if it had already ended.
        Raises EngineClosedError: this process was forked, and the engine stayed in the parent."""
        if self._cancelled or self._collector.ended:
            return False
        self._collector.refuse_forked()
        self._cancelled = True
        self._cancel()
        return True

    close = cancel

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end.

        Raises:
            CancelledError, DeadlineError, EngineClosedError, ProcessorError, GrammarError: why the request failed.
            TimeoutError: it takes longer than ``timeout`` seconds; the request goes on.
        """
        self._collector.wait(timeout)
        return self._get_result()

    def events(self, timeout: float | None = None) -> Iterator[Delta]:
        """Every piece of every output, as it comes.

        Raises:
            the errors of :meth:`result`; TimeoutError if a piece takes longer than ``timeout`` seconds.
        """
        while (delta := self._collector.take(timeout)) is not None:
            yield self._note_delta(delta)
        self._get_result()

    def __iter__(self) -> Iterator[str]:
        self._single()
        return self

    def __next__(self) -> str:
        while (delta := self._collector.take()) is not None:
            if text := self._text(self._note_delta(delta)):
                return text
        self._get_result()
        if text := self._last_text():
            return text
        raise StopIteration

    async def events_async(self) -> AsyncIterator[Delta]:
        with self._collector.wait_for_pieces(pieces=True) as waiter:
            while True:
                ended = self._collector.ended  # read it first: nothing is added after the end
                while (delta := self._collector.poll()) is not None:
                    yield self._note_delta(delta)
                if ended:
                    break
                await self._wait(waiter)
        self._get_result()

    async def __aiter__(self) -> AsyncIterator[str]:
        self._single()
        async for delta in self.events_async():
            if text := self._text(delta):
                yield text
        if text := self._last_text():
            yield text

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> GenerationResult:
        if not self._collector.ended:
            with self._collector.wait_for_pieces(pieces=False) as waiter:
                while not self._collector.ended:
                    await self._wait(waiter)
        return self._get_result()

    async def _wait(self, waiter: Waiter) -> None:
        """Wait for the collector to change; a cancelled task cancels the request."""
        try:
            await waiter.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _note_delta(self, delta: Delta) -> Delta:
        if delta.index == 0:
            self.token_ids.extend(delta.token_ids)
        return delta

    def _text(self, delta: Delta) -> str:
        """The text that iterating yields for a piece."""
        return delta.text

    def _last_text(self) -> str:
        """The text that iterating yields after the last piece."""
        return ""

    def _single(self) -> None:
        if self.outputs > 1:
            raise UsageError(
                "n", f"is {self.outputs}, and the texts of several outputs would mix", "iterate over events()"
            )

    def _get_result(self) -> GenerationResult:
        if self._finalizer is not None:  # it references the request, whose error's traceback references this handle
            self._finalizer.detach()
        error = self._collector.error
        if error is not None:  # a copy each time: otherwise tracebacks of many readers would pile up
            raise copy.copy(error) from error.__cause__
        assert self._collector.result is not None
        return self._collector.result
