"""Many requests at once: one thread that works, and any number of threads that ask."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import (
    CancelledError,
    DeadlineError,
    EngineClosedError,
    GpuError,
    LlmcError,
    QueueFullError,
    RequestError,
    UsageError,
)
from llmc.runtime.api.handle import Handle, Mailbox, is_serving, mark_serving
from llmc.runtime.api.options import Determinism, EngineOptions, row_limit
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import GenerationResult, Output
from llmc.runtime.engine.continuous import ContinuousBatch, is_lost
from llmc.runtime.engine.input_processor import Intake
from llmc.runtime.engine.scheduler import Queue
from llmc.runtime.engine.sequence import Job, named
from llmc.runtime.kv.budget import CacheBudget
from llmc.runtime.kv.cache_file import load_session, save_session
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.kv.rows import TornError
from llmc.runtime.observe.metrics import EngineMetrics, Gauges
from llmc.runtime.observe.tracing import event, record_spans
from llmc.runtime.sessions import Session
from llmc.runtime.speculation import Drafter
from llmc.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_OUTCOMES: dict[type[BaseException], str] = {CancelledError: "cancelled", DeadlineError: "deadline"}


class Engine:
    """Serves requests on a loaded model; :func:`llmc.runtime.load` makes one.

    :meth:`submit` may be called from any thread or event loop. One thread of the engine's own does everything else, a
    :meth:`step` at a time; it starts with the first request. What a request brings along (processors, criteria) runs
    on that thread and its helpers; where it fails, its request fails, and all others go on. A call of the session that
    fails is the end of the requests that shared it, and a GPU that was lost the end of all of them and of the engine.

    Args:
        session: the loaded graphs and their cache; nobody else may use it while requests run.
        manifest, tokenizer: of the same bundle.
        max_context: longest sequence, prompt and new tokens together.
        prefill_chunk: prompt tokens per call.
        options: see :class:`llmc.runtime.api.options.EngineOptions`.
        memory: bytes that this process may take.
        prefixes, store: the prefix cache and its disk tier, None for none; closed with the engine.
        drafter: guesses tokens, None for none; closed with the engine.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        tokenizer: Tokenizer,
        *,
        max_context: int,
        prefill_chunk: int,
        options: EngineOptions,
        memory: int,
        prefixes: PrefixCache | None = None,
        store: PrefixStore | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.options = options
        self.metrics = EngineMetrics()
        self.prefixes = prefixes
        # A strict step feeds a dummy token after the last one, which wants a position of its own.
        self.max_context = max_context - (options.determinism is Determinism.STRICT)
        self._name = manifest.source.name
        self._intake = Intake(manifest, tokenizer, self.max_context, row_limit(manifest, options), drafter is not None)
        self._pool = ThreadPoolExecutor(options.sampling_threads, "llmc-sampling", mark_serving)
        # Of its own, for a similarity that takes long must not keep others from sampling.
        self._comparing = ThreadPoolExecutor(1, "llmc-comparing", mark_serving)
        self._waiting = Queue()
        self._batch = ContinuousBatch(
            session,
            manifest,
            self._intake,
            self._waiting,
            end=self._end,
            fail=self._fail,
            metrics=self.metrics,
            options=options,
            prefill_chunk=prefill_chunk,
            budget=CacheBudget(
                manifest, memory, 0 if prefixes is None else prefixes.max_bytes, session.cache.device_memory
            ),
            prefixes=prefixes,
            drafter=drafter,
            pool=self._pool if options.sampling_threads > 1 else None,
        )
        self._closeable = [part for part in (store, drafter) if part is not None]
        self._jobs: dict[Job, None] = {}  # in the order in which they came
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may close an engine anywhere
        self._pid = os.getpid()
        self._then: Callable[[], None] | None = None
        self._live: dict[int, Job] = {}  # by the number that a handle cancels it with
        self._compared: dict[Job, None] = {}  # samples that are being compared
        self._thread: threading.Thread | None = None
        self._arriving = 0  # requests accepted, and not seen by the engine's thread yet
        self._unserved = 0  # seen, and without a row yet
        self._closing = False
        self._freed = False
        self._lost: GpuError | None = None

    # ------------------------------------------------------------------------------------------ any thread

    def submit(self, request: Request) -> Handle:
        """Take a request in.

        Raises:
            QueueFullError: ``options.max_queue`` requests wait already.
            EngineClosedError: the engine is closed, or its GPU was lost.
            RequestError, UsageError, GrammarError: the request cannot be served.
        """
        self._refuse_forked()
        try:
            job = self._intake.job(request, mailbox := Mailbox(), self.metrics)
            with self._lock:
                self._accept(job)
        except LlmcError:
            self.metrics.refuse()
            raise
        return Handle(mailbox, partial(self._cancel, job.number), job.streams, keep=request.on_delta is not None)

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the engine's thread between two steps, and wait for it.

        Raises:
            EngineClosedError: the engine is closed; or whatever ``function`` raises.
        """
        if threading.current_thread() is self._thread:  # a client's function, which would wait for itself
            function()
            return
        if is_serving():
            raise UsageError("a function that came with a request asks the engine to wait for itself; do it elsewhere")
        self._refuse_forked()
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  # handed to the caller
                done.put(error)
            else:
                done.put(None)

        with self._lock:
            self._start_thread()
            self._inbox.put(run)
        if (error := done.get()) is not None:
            raise error

    def save(self, path: str | Path, tokens: Sequence[int]) -> int:
        """Save what the prefix cache has of ``tokens``, a conversation so far, to a file; says how many tokens that is.

        Raises:
            UsageError: there is no prefix cache, or the file cannot be written.
            RequestError: nothing of ``tokens`` is cached: they were never fed, are fewer than a block, or were evicted.
            ResourceError: the disk is full.
        """
        prefixes = self._prefix_cache()
        held: list[NDArray[Any]] = []

        def read() -> None:
            with prefixes.match(tokens) as match:
                held.extend(match.blocks)

        self.call(read)
        if not held:
            raise RequestError(
                f"none of the {len(tokens)} tokens is in the prefix cache, which keeps blocks of {prefixes.block}; "
                "generate from them first, or give the cache more memory"
            )
        save_session(Path(path), tokens, held, prefixes.block, prefixes.key)
        return len(held) * prefixes.block

    def restore(self, path: str | Path) -> list[int]:
        """Put what :meth:`save` saved back into the prefix cache; the tokens that it was given.

        Raises:
            UsageError: there is no prefix cache, or the file cannot be opened.
            RequestError: it is no such file, is damaged, or belongs to another model.
        """
        prefixes = self._prefix_cache()
        size = prefixes.block
        tokens, blocks = load_session(Path(path), size, prefixes.key)
        cached = tokens[: len(blocks) * size]
        self.call(lambda: prefixes.insert(cached, lambda start, end: blocks[start // size : end // size]))
        return tokens

    def _prefix_cache(self) -> PrefixCache:
        if self.prefixes is None:
            raise UsageError("the engine has no prefix cache; load with prefix_cache_bytes above 0")
        return self.prefixes

    def close(self, drain: bool = False, then: Callable[[], None] | None = None) -> None:
        """Stop, and wait until the engine's thread has ended; with ``drain`` accepted requests are finished first,
        without it they fail. Closing twice is allowed, and so is closing an engine that stopped because its GPU was
        lost. ``then`` is called once nothing uses the session any more."""
        if os.getpid() != self._pid:  # in a forked process there is no thread to wait for
            return
        with self._lock:
            first, self._closing = not self._closing, True
            thread = self._thread
            self._then = self._then or then
            freed = self._freed
        if freed:  # closed before, or stopped by itself
            self._call_then()
        elif thread is None:
            if first:
                self._free()
        else:
            self._inbox.put(lambda: None if drain else self._fail_all(EngineClosedError("the engine was closed")))
        if thread is not None and not is_serving():  # a client's function or the garbage collector may close it
            thread.join()

    def _free(self) -> None:
        """After the last request."""
        self._pool.shutdown(wait=False)
        self._comparing.shutdown(wait=False)
        for part in self._closeable:
            try:
                part.close()
            except Exception:
                log.exception("%s could not be closed", type(part).__name__)
        self._call_then()

    def _call_then(self) -> None:
        with self._lock:
            self._freed = True
            then, self._then = self._then, None
        if then is None:
            return
        try:
            then()
        except GpuError as error:
            if self._lost is None and not error.lost:
                raise
            log.warning("what a lost GPU held could not be freed: %s", error)

    def _accept(self, job: Job) -> None:
        self._start_thread()
        if (waiting := self._arriving + self._unserved) >= self.options.max_queue:
            raise QueueFullError(f"{waiting} requests wait already, as many as may; try again later")
        self._arriving += 1
        self._inbox.put(partial(self._enqueue, job))

    def _refuse_forked(self) -> None:
        """Before any lock is taken: the thread that held it in that moment is not here to let it go."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "the engine's thread stayed in the process that this one was forked from; load here"
            )

    def _start_thread(self) -> None:
        if self._lost is not None:
            raise EngineClosedError(f"the engine is closed: {self._lost}")
        if self._closing:
            raise EngineClosedError("the engine is closed; load the bundle again")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="llmc-engine", daemon=True)
            self._thread.start()

    def _cancel(self, number: int) -> None:
        """May be called by the garbage collector, anywhere: it only leaves a message."""
        self._inbox.put(partial(self._cancelled, number))

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _serve(self) -> None:
        mark_serving()
        while self._jobs or not self._closing or not self._inbox.empty():
            try:
                self.step()
            except BaseException as error:  # noqa: BLE001  # without this thread, clients would wait for ever
                self._recover(error)
        self._free()

    def _recover(self, error: BaseException) -> None:
        """A step failed as a whole: whoever held a row fails; everyone else too, unless rows were all that suffered."""
        with suppress(Exception):  # a handler of the log may be what failed
            log.error("the engine failed in a step; the requests that it had fail", exc_info=error)
        torn = isinstance(error, TornError)
        reason = error.__cause__ if torn and error.__cause__ is not None else error
        if is_lost(reason):
            torn, reason = False, self._lose(reason)
        holders = self._batch.abandon(self._jobs)
        self._fail_each(holders if torn else [*self._jobs, *self._compared], named(reason))

    def _lose(self, error: BaseException) -> GpuError:
        """From here on nothing can be run: no request is accepted, and the thread ends."""
        lost = GpuError(f"the GPU was lost ({error}); load the bundle again in a new process", lost=True)
        with self._lock:
            self._lost, self._closing = lost, True
        return lost

    def step(self) -> None:
        """One round: take messages, give rows to those who wait, feed a chunk of a prompt, decode everyone who can."""
        self._receive()
        if self._lost is not None:  # those who came meanwhile
            self._fail_all(self._lost)
            return
        self._batch.admit()
        self._gauge()
        self._batch.feed()
        self._batch.decode()

    def _receive(self) -> None:
        """Requests and cancellations that came; without anything to do, wait for one."""
        while not (self._jobs and self._inbox.empty()):
            if not self._jobs:
                self._gauge()
            with suppress(queue.Empty):
                self._inbox.get(timeout=self._patience())()
            if self._closing and not self._jobs:
                return
            if not self._jobs:
                self._expire()
        self._expire()

    def _patience(self) -> float | None:
        """Seconds until the first deadline of those whose samples are being compared."""
        first = min((job.deadline for job in self._compared), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _expire(self) -> None:
        """Fail those whose time is over."""
        now = time.monotonic()
        for job in [job for job in (*self._jobs, *self._compared) if job.deadline <= now]:
            self._fail(job, DeadlineError(f"the deadline of {job.request.deadline_s:g} s passed; {job.progress()}"))

    def _cancelled(self, number: int) -> None:
        if (job := self._live.get(number)) is not None:
            self._fail(job, CancelledError("the request was cancelled"))

    def _enqueue(self, job: Job) -> None:
        self._jobs[job] = None
        self._live[job.number] = job
        with self._lock:
            self._arriving -= 1
            self._unserved += 1
        job.ticket = self._waiting.push(job, job.request.priority)

    def _end(self, job: Job, outputs: Callable[[], Sequence[Output]]) -> None:
        """A job is done. Comparing samples with one another may take long, so that is left to another thread."""
        self._jobs.pop(job, None)
        if job.params.consensus is not None or job.request.similarity is not None:
            self._compared[job] = None
            self._comparing.submit(self._deliver, job, outputs)
        else:
            self._deliver(job, outputs)

    def _deliver(self, job: Job, outputs: Callable[[], Sequence[Output]]) -> None:
        try:
            made = outputs()
            self._close(job, made[0].finish_reason, lambda: job.result(made))
        except BaseException as error:  # noqa: BLE001  # it reaches the client
            self._close(job, "error", None, named(error))

    def _fail(self, job: Job, error: BaseException) -> None:
        """A job cannot go on; its rows are free at once."""
        if job.mailbox.ended:
            return
        self._batch.drop(job)
        self._jobs.pop(job, None)
        self._close(job, _OUTCOMES.get(type(error), "error"), None, error)

    def _fail_all(self, error: BaseException) -> None:
        self._fail_each([*self._jobs, *self._compared], error)

    def _fail_each(self, jobs: Sequence[Job], error: BaseException) -> None:
        for job in jobs:
            try:
                self._fail(job, error)
            except Exception:  # noqa: BLE001  # whatever it is, its client must not wait for ever
                self._jobs.pop(job, None)
                self._close(job, "error", None, error)

    def _close(
        self, job: Job, reason: str, result: Callable[[], GenerationResult] | None, error: BaseException | None = None
    ) -> None:
        """Tell the client, and leave a line in the log and a span, which cost nothing where nobody wants them."""
        job.timeline.finish(reason)
        # A kept traceback would keep everything that its frames saw; a failure inside still has it, in its cause.
        job.mailbox.end(result() if result else None, None if error is None else error.with_traceback(None))
        self._inbox.put(partial(self._forget, job))
        with suppress(Exception):  # what an application hangs on the log or the spans is not the engine's trouble
            if log.isEnabledFor(logging.INFO):
                event(log, "request ended", **vars(job.timeline.metrics()))
            record_spans(job.timeline, model=self._name, parent=job.trace)

    def _forget(self, job: Job) -> None:
        self._live.pop(job.number, None)
        self._compared.pop(job, None)

    def _gauge(self) -> None:
        """What holds now; and how many places in the queue are taken."""
        with self._lock:
            self._unserved = sum(job.timeline.admitted is None for job in self._jobs)
        prefixes = 0 if self.prefixes is None else self.prefixes.counters.bytes
        self.metrics.gauges = Gauges(
            waiting=self._unserved,
            running=sum(bool(job.strands) for job in self._jobs),
            kv_reserved_bytes=self._batch.reserved_bytes,
            kv_used_bytes=self._batch.used_bytes,
            prefix_cache_bytes=prefixes,
        )
