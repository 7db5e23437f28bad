"""Many requests at once: one thread that works, and any number of threads that ask."""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, overload

from llmc.bundle import Manifest
from llmc.errors import CancelledError, DeadlineError, EngineClosedError, GpuError, LlmcError, QueueFullError
from llmc.runtime.api.handle import Handle, OutputCollector, is_serving, mark_serving
from llmc.runtime.api.options import Determinism, EngineOptions, check_adapters, row_limit
from llmc.runtime.api.request import Request
from llmc.runtime.engine.input_processor import InputProcessor
from llmc.runtime.engine.output_processor import OutputProcessor
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.engine.sequence import RequestState, SamplerOutput, name_error
from llmc.runtime.engine.sequence import Sequence as Tokens
from llmc.runtime.host import threads
from llmc.runtime.kv.budget import CacheBudget
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.kv.rows import Rows, TornError
from llmc.runtime.observe.metrics import EngineMetrics, Gauges
from llmc.runtime.runner.model_runner import ModelRunner
from llmc.runtime.sessions import Session
from llmc.runtime.sessions.adapters import Adapters
from llmc.runtime.speculation.drafters import Drafter
from llmc.runtime.speculation.head_drafter import HeadDrafter
from llmc.runtime.speculation.speculator import make_speculators
from llmc.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Handle)
_OUTCOMES: dict[type[BaseException], str] = {CancelledError: "cancelled", DeadlineError: "deadline"}


class Engine:
    """Serve requests on a loaded model; :func:`llmc.runtime.load` makes one.

    :meth:`submit` may be called from any thread or event loop. The engine's own thread, which starts with the first
    request, does everything else, one :meth:`step` at a time. A request's own functions run on that thread and its
    helpers; where one fails, its request fails. A session call that fails ends the requests that shared it; a lost GPU
    ends them all.

    Args:
        session: the loaded graphs and their cache; nobody else may use it while requests run.
        manifest, tokenizer: of the same bundle.
        max_context: longest sequence, prompt and new tokens together.
        prefill_chunk: prompt tokens per call.
        options: see :class:`llmc.runtime.api.options.EngineOptions`.
        memory: bytes that this process may take.
        prefixes, store, drafter: prefix cache, its disk tier and the drafter, None for none; closed with the engine.
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

        def open_adapters() -> None:
            check_adapters(manifest, options.determinism)
            session.open_adapters()

        self.adapters = Adapters(manifest, open_adapters)
        # A strict step feeds a dummy token after the last one, which wants a position of its own.
        self.max_context = max_context - (options.determinism is Determinism.STRICT)
        max_rows = row_limit(manifest, options)
        rows: Rows[Any] = Rows(session.cache)
        self._runner = ModelRunner(
            session,
            manifest,
            rows,
            options.determinism,
            max_context=max_context,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            metrics=self.metrics,
        )
        self._scheduler = Scheduler(
            self._runner,
            rows,
            max_rows=max_rows,
            max_context=self.max_context,
            budget=CacheBudget(
                manifest, memory, 0 if prefixes is None else prefixes.max_bytes, session.cache.device_memory
            ),
            options=options,
            plan=manifest.device or manifest.memory,
            guarded=self._guard,
            prefixes=prefixes,
        )
        if isinstance(drafter, HeadDrafter):
            self._runner.watch = drafter.watch
        speculate = None if drafter is None else make_speculators(drafter, self._runner)
        self._inputs = InputProcessor(manifest, tokenizer, self.max_context, max_rows, self.adapters, speculate)
        self._outputs = OutputProcessor(self._scheduler, self._guard, self._forget)
        self._closeable = [part for part in (store, drafter) if part is not None]
        self._requests: dict[int, RequestState] = {}  # that did not end yet, in the order in which they came
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may close an engine anywhere
        self._pid = os.getpid()
        self._then: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._first_deadline = math.inf  # of these, or of some that ended before theirs
        self._arriving = 0  # requests accepted, and not seen by the engine's thread yet
        self.metrics.read_gauges = self._gauges
        self._closing = False
        self._freed = False
        self._lost: GpuError | None = None

    # ------------------------------------------------------------------------------------------ any thread

    @overload
    def submit(self, request: Request) -> Handle: ...
    @overload
    def submit(self, request: Request, handle: Callable[..., _H]) -> _H: ...
    def submit(self, request: Request, handle: Callable[..., Any] = Handle) -> Any:
        """Take a request in; ``handle`` makes the handle.

        Raises:
            QueueFullError: ``options.max_queue`` requests wait already.
            EngineClosedError: the engine is closed, or its GPU was lost.
            RequestError, UsageError, GrammarError: the request cannot be served.
        """
        self._refuse_forked()
        try:
            state = self._inputs.process(request, collector := OutputCollector(), self.metrics)
            with self._lock:
                self._accept(state)
        except LlmcError:
            self.metrics.count({}, "refused")
            raise
        made = handle(collector, partial(self._cancel, state.number), state.streams, keep=request.on_delta is not None)
        made.prompt_tokens, made.most_tokens = len(state.prompt), state.most_tokens
        timeline = state.timeline
        made.generated = partial(getattr, timeline, "output_tokens")
        made.is_waiting = lambda: timeline.admitted is None
        return made

    def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` on the engine's thread between two steps, and return or raise what it does.

        Raises:
            EngineClosedError: the engine is closed.
        """
        if threading.current_thread() is self._thread:  # a client's function, which would wait for itself
            return function()
        self._refuse_forked()
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  # handed to the caller
                done.set_exception(error)

        with self._lock:
            self._start_thread()
            self._inbox.put(run)
        return done.result()

    def close(self, drain: bool = False, then: Callable[[], None] | None = None) -> None:
        """Stop, and wait until the engine's thread has ended. Closing again is allowed.

        Args:
            drain: finish accepted requests first; by default they fail.
            then: called once nothing uses the session any more.
        """
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
            self._stop(drain)
        if thread is not None and not is_serving():  # a client's function or the garbage collector may close it
            thread.join()

    def _stop(self, drain: bool = False) -> None:
        """Make the engine's thread end soon, without waiting for it."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None if drain else self._fail_all(EngineClosedError("the engine was closed")))

    def _free(self) -> None:
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

    def _accept(self, request: RequestState) -> None:
        self._start_thread()
        most = self.options.max_queue
        # Not even counted as long as all requests together are fewer.
        if (
            self._arriving + len(self._requests) >= most
            and (waiting := self._arriving + self._count_unserved()) >= most
        ):
            raise QueueFullError(f"{waiting} requests wait already, as many as may; try again later")
        self._arriving += 1
        self._inbox.put(partial(self._enqueue, request))

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
            self._thread = threads.start(self._serve, "llmc-engine", self._stop)

    def _cancel(self, number: int) -> None:
        """May be called by the garbage collector, anywhere: it only leaves a message."""
        self._inbox.put(partial(self._handle_cancel, number))

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _serve(self) -> None:
        mark_serving()
        try:
            while not self._closing or self._busy or not self._inbox.empty():
                try:
                    self.step()
                except BaseException as error:  # noqa: BLE001  # without this thread, clients would wait for ever
                    self._recover(error)
        except BaseException as error:  # noqa: BLE001  # nor could it recover: of no memory, say
            self._give_up(error)
        self._free()

    def step(self) -> None:
        """Run one round: receive messages, admit requests, feed prompts, decode."""
        self._receive()
        if self._lost is not None:  # those who came meanwhile
            self._fail_all(self._lost)
            return
        for sequence in self._scheduler.admit():
            self._outputs.begin(sequence)
        self._prefill()
        self._decode()

    def _prefill(self) -> None:
        sequences = self._scheduler.next_prefill()
        if len(sequences) > 1:
            self._prefill_together(sequences)
            return
        for sequence in sequences:
            with self._guard(sequence.request):
                start, every = sequence.cached, sequence.wants_every_logit
                logits = self._runner.prefill(sequence, every)
                if every:
                    self._outputs.keep_prompt_logprobs(sequence, start, logits)
                for whole in self._scheduler.note_prefilled(sequences):
                    self._outputs.begin(whole, logits[-1])

    def _prefill_together(self, sequences: Sequence[Tokens]) -> None:
        try:
            logits = self._runner.prefill_together(sequences)
        except Exception as error:  # the call that they share failed
            if is_fatal(error):
                raise
            for sequence in sequences:  # of as many requests
                self._fail(sequence.request, name_error(error))
            return
        after = dict(zip(sequences, logits, strict=True))
        for sequence in self._scheduler.note_prefilled(sequences):
            self._outputs.begin(sequence, after[sequence])

    def _decode(self) -> None:
        """Run one step of every sequence that decodes: one call, and one for each that has drafts to verify."""
        if not (sequences := self._scheduler.next_decode()):
            return
        outputs: list[SamplerOutput[Any]] = []
        failed: dict[RequestState, BaseException] = {}
        for call in self._runner.divide(sequences):
            try:
                found = self._outputs.sample(call, self._runner.execute(call))
                for output in found:
                    self._runner.accept(output.sequence, output.tokens)
                outputs += found
            except Exception as error:  # the call that they share failed
                if is_fatal(error):
                    raise
                failed |= {sequence.request: name_error(error) for sequence in call}
        self._scheduler.note_decoded(outputs)
        for request, reason in failed.items():
            self._fail(request, reason)
        if failed:
            outputs = [output for output in outputs if output.sequence.request not in failed]
        self._outputs.commit(outputs)

    # ------------------------------------------------------------------------------------------ messages

    @property
    def _busy(self) -> bool:
        for request in self._requests.values():  # noqa: SIM110  # asked for in every step: no generator
            if not request.comparing:
                return True
        return False

    def _receive(self) -> None:
        """Take in messages; without anything to do, wait for one."""
        while not (self._busy and self._inbox.empty()):
            with suppress(queue.Empty):
                self._inbox.get(timeout=self._patience())()
            if not self._busy:
                if self._closing:
                    return
                self._expire()
        self._expire()

    def _patience(self) -> float | None:
        """Seconds until the first deadline of those whose samples are being compared."""
        first = min((request.deadline for request in self._requests.values() if request.comparing), default=None)
        return None if first is None or first == float("inf") else max(0.0, first - time.monotonic())

    def _enqueue(self, request: RequestState) -> None:
        with self._lock:
            self._requests[request.number] = request
            self._arriving -= 1
        self._first_deadline = min(self._first_deadline, request.deadline)
        self._scheduler.add(request)

    def _handle_cancel(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None:
            self._fail(request, CancelledError("the request was cancelled"))

    def _expire(self) -> None:
        if self._first_deadline == math.inf or (now := time.monotonic()) < self._first_deadline:
            return
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            limit = request.request.deadline_s
            self._fail(request, DeadlineError(f"the deadline of {limit:g} s passed; {request.progress()}"))
        self._first_deadline = min((request.deadline for request in self._requests.values()), default=math.inf)

    def _forget(self, number: int) -> None:
        """May be called by any thread: it only leaves a message."""
        self._inbox.put(partial(self._requests.pop, number, None))

    # ------------------------------------------------------------------------------------------ levels, on any thread

    def _count_unserved(self) -> int:
        return sum(request.timeline.admitted is None for request in list(self._requests.values()))

    def _gauges(self) -> Gauges:
        """Gauges as things are; between two steps, if these run meanwhile, as they just were."""
        return Gauges(
            waiting=self._count_unserved(),
            running=sum(bool(request.group.sequences) for request in list(self._requests.values())),
            kv_reserved_bytes=self._scheduler.reserved_bytes,
            kv_used_bytes=self._scheduler.used_bytes,
            prefix_cache_bytes=0 if self.prefixes is None else self.prefixes.bytes,
        )

    # ------------------------------------------------------------------------------------------ failures

    @contextmanager
    def _guard(self, request: RequestState) -> Iterator[None]:
        """A context in which an error ends this request alone, unless it concerns all rows."""
        try:
            yield
        except BaseException as error:
            if is_fatal(error):
                raise
            self._fail(request, name_error(error))

    def _fail(self, request: RequestState, error: BaseException) -> None:
        """End a request that cannot go on; its rows are free at once."""
        if self._requests.pop(request.number, None) is None or request.collector.ended:
            return
        try:
            self._scheduler.drop(request)
        finally:  # whatever it is, its client must not wait for ever
            self._outputs.close(request, _OUTCOMES.get(type(error), "error"), error=error)

    def _fail_all(self, error: BaseException, holders: Sequence[RequestState] | None = None) -> None:
        """End all requests, or those that held rows which nobody holds any more."""
        for request in [*self._requests.values()] if holders is None else holders:
            with suppress(Exception):
                self._fail(request, error)

    def _recover(self, error: BaseException) -> None:
        """After a step that failed as a whole, fail those who held rows; all requests, if more than rows suffered."""
        with suppress(Exception):  # a handler of the log may be what failed
            log.error("the engine failed in a step; the requests that it had fail", exc_info=error)
        torn = isinstance(error, TornError)
        reason = error.__cause__ if torn and error.__cause__ is not None else error
        if is_lost(reason):
            torn, reason = False, self._lose(reason)
        holders = self._scheduler.abandon(self._requests.values())
        self._fail_all(name_error(reason), holders if torn else None)

    def _give_up(self, error: BaseException) -> None:
        """End the thread whatever it was in the middle of, so that nobody waits for it."""
        with self._lock:
            self._closing = True
        while not self._inbox.empty():  # those who came, and functions that somebody waits for
            with suppress(BaseException):
                self._inbox.get()()
        for request in [*self._requests.values()]:
            request.collector.end(None, name_error(error))

    def _lose(self, error: BaseException) -> GpuError:
        """Note that the GPU is gone: no request is accepted any more, and the thread ends."""
        lost = GpuError(f"the GPU was lost ({error}); load the bundle again in a new process", lost=True)
        with self._lock:
            self._lost, self._closing = lost, True
        return lost


def is_fatal(error: BaseException) -> bool:
    """True for an error that concerns everyone who holds a row."""
    return isinstance(error, TornError) or is_lost(error)


def is_lost(error: BaseException) -> bool:
    """True for an error after which nothing in this process can use the GPU."""
    return isinstance(error, GpuError) and error.lost
