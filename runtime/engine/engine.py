"""Many requests at once: one thread computes for any number of threads that ask."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, overload

from llmc.bundle import Manifest
from llmc.errors import CancelledError, DeadlineError, GpuError, LlmcError, QueueFullError
from llmc.runtime.api.handle import Handle, OutputCollector
from llmc.runtime.api.options import Determinism, EngineOptions, row_limit
from llmc.runtime.api.request import Request
from llmc.runtime.engine.branch import RequestState, SamplerOutput, name_error
from llmc.runtime.engine.engine_thread import EngineThread
from llmc.runtime.engine.input_processor import InputProcessor
from llmc.runtime.engine.output_processor import OutputProcessor
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.kv.budget import CacheBudget
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.kv.rows import Rows, TornError
from llmc.runtime.observe.metrics import EngineMetrics, Gauges
from llmc.runtime.runner.model_runner import ModelRunner
from llmc.runtime.sessions import Session
from llmc.runtime.sessions.adapters import Adapters
from llmc.runtime.speculation.drafters import Drafter
from llmc.runtime.speculation.speculator import make_speculators
from llmc.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Handle)
_OUTCOMES: dict[type[BaseException], str] = {CancelledError: "cancelled", DeadlineError: "deadline"}


class Engine:
    """Serve requests on a loaded model; :func:`llmc.runtime.load` makes one.

    :meth:`submit` may be called from any thread or event loop. The engine's own thread, which starts with the first
    request, does everything else, one :meth:`step` at a time. Functions that came with a request run on that thread and
    its helpers; an error in one fails its request. A failed call of the session fails the requests that shared it; a
    lost GPU fails all.

    Args:
        session: the loaded graphs and their cache; used by nothing else while requests run.
        manifest, tokenizer: of the same bundle.
        max_context: longest branch, prompt and new tokens together.
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

        self.adapters = Adapters(manifest, lambda: session.open_adapters())
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
        self._runner.watch = drafter.watch if drafter is not None else None
        speculate = None if drafter is None else make_speculators(drafter, self._runner)
        self._inputs = InputProcessor(manifest, tokenizer, self.max_context, max_rows, self.adapters, speculate)
        self._outputs = OutputProcessor(self._scheduler, self._guard, self._forget)
        self._closeable = [part for part in (store, drafter) if part is not None]
        self._requests: dict[int, RequestState] = {}  # all that have not ended, in the order of arrival
        self._thread = EngineThread(
            self.step,
            is_busy=self._is_busy,
            recover=self._recover,
            fail_all=self._fail_all,
            give_up=self._give_up,
            free=self._free,
        )
        self._first_deadline = math.inf  # no request has an earlier one
        self._arriving = 0  # accepted requests that the engine's thread has not seen yet
        self.metrics.read_gauges = self._gauges

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
        self._thread.refuse_forked()
        try:
            state = self._inputs.process(request, collector := OutputCollector(), self.metrics)
            with self._thread.lock:
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
        return self._thread.call(function)

    def close(self, drain: bool = False, then: Callable[[], None] | None = None) -> None:
        """Stop, and wait until the engine's thread has ended. Closing again is allowed.

        Args:
            drain: finish accepted requests first; by default they fail.
            then: called once nothing uses the session any more.
        """
        self._thread.close(drain, then)

    def _accept(self, request: RequestState) -> None:
        self._thread.start()
        most = self.options.max_queue
        # Not even counted as long as all requests together are fewer.
        if (
            self._arriving + len(self._requests) >= most
            and (waiting := self._arriving + self._count_unserved()) >= most
        ):
            raise QueueFullError(f"{waiting} requests wait already, as many as may; try again later")
        self._arriving += 1
        self._thread.post(partial(self._enqueue, request))

    def _cancel(self, number: int) -> None:
        """May be called by the garbage collector, anywhere: it only leaves a message."""
        self._thread.post(partial(self._handle_cancel, number))

    # ------------------------------------------------------------------------------------------ the engine's thread

    def step(self) -> None:
        """Run one round: receive messages, admit requests, feed prompts, decode."""
        self._receive()
        if self._thread.lost is not None:
            self._fail_all(self._thread.lost)  # requests that came meanwhile
            return
        for branch in self._scheduler.admit():
            self._outputs.begin(branch)
        self._prefill()
        self._decode()

    def _prefill(self) -> None:
        if not (branches := self._scheduler.next_prefill()):
            return
        start, every = branches[0].cached, branches[0].wants_every_logit
        with self._guard(*(branch.request for branch in branches)):
            logits = dict(zip(branches, self._runner.prefill(branches, every), strict=True))
            if every:
                self._outputs.keep_prompt_logprobs(branches[0], start, logits[branches[0]])
            for whole in self._scheduler.note_prefilled(branches):
                self._outputs.begin(whole, logits[whole][-1])

    def _decode(self) -> None:
        """Run one step of every branch that decodes: one call, and one for each that has drafts to verify."""
        if not (branches := self._scheduler.next_decode()):
            return
        outputs: list[SamplerOutput[Any]] = []
        failed: dict[RequestState, BaseException] = {}
        for call, compute in self._runner.divide(branches):
            try:
                found = self._outputs.sample(call, compute())
                for output in found:
                    self._runner.accept(output.branch, output.tokens)
                outputs += found
            except Exception as error:  # the call that they share failed
                if is_fatal(error):
                    raise
                failed |= {branch.request: name_error(error) for branch in call}
        self._scheduler.note_decoded(outputs)
        for request, reason in failed.items():
            self._fail(request, reason)
        if failed:
            outputs = [output for output in outputs if output.branch.request not in failed]
        self._outputs.commit(outputs)

    # ------------------------------------------------------------------------------------------ messages

    def _is_busy(self) -> bool:
        for request in self._requests.values():  # noqa: SIM110  # asked for in every step: no generator
            if not request.comparing:
                return True
        return False

    def _receive(self) -> None:
        """Take in messages; without anything to do, wait for one."""
        while self._thread.has_message or not self._is_busy():
            self._thread.take(self._patience())
            if not self._is_busy():
                if self._thread.closing:
                    return
                self._expire()
        self._expire()

    def _patience(self) -> float | None:
        """Seconds until the first deadline of those whose samples are being compared."""
        first = min((request.deadline for request in self._requests.values() if request.comparing), default=None)
        return None if first is None or first == float("inf") else max(0.0, first - time.monotonic())

    def _enqueue(self, request: RequestState) -> None:
        with self._thread.lock:
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
        self._thread.post(partial(self._requests.pop, number, None))

    # ------------------------------------------------------------------------------------------ levels, on any thread

    def _count_unserved(self) -> int:
        return sum(request.timeline.admitted is None for request in list(self._requests.values()))

    def _gauges(self) -> Gauges:
        """Gauges of this moment, or of the last one between two steps."""
        return Gauges(
            waiting=self._count_unserved(),
            running=sum(bool(request.group.branches) for request in list(self._requests.values())),
            kv_reserved_bytes=self._scheduler.reserved_bytes,
            kv_used_bytes=self._scheduler.used_bytes,
            prefix_cache_bytes=0 if self.prefixes is None else self.prefixes.bytes,
        )

    # ------------------------------------------------------------------------------------------ failures

    @contextmanager
    def _guard(self, *requests: RequestState) -> Iterator[None]:
        """A context in which an error ends these requests alone, unless it concerns all rows."""
        try:
            yield
        except BaseException as error:
            if is_fatal(error):
                raise
            for request in requests:
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
        """End all requests, or only ``holders``, whose rows were freed."""
        for request in [*self._requests.values()] if holders is None else holders:
            with suppress(Exception):
                self._fail(request, error)

    def _recover(self, error: BaseException) -> None:
        """After a step that failed as a whole, fail the requests that held rows; all requests, if more was lost."""
        with suppress(Exception):  # a handler of the log may be what failed
            log.error("the engine failed in a step; the requests that it had fail", exc_info=error)
        torn = isinstance(error, TornError)
        reason = error.__cause__ if torn and error.__cause__ is not None else error
        if is_lost(reason):
            torn, reason = False, self._thread.lose(reason)
        holders = self._scheduler.abandon(self._requests.values())
        self._fail_all(name_error(reason), holders if torn else None)

    def _give_up(self, error: BaseException) -> None:
        """End all requests for their clients, whatever state the engine is in."""
        for request in [*self._requests.values()]:
            request.collector.end(None, name_error(error))

    def _free(self) -> None:
        for part in self._closeable:
            try:
                part.close()
            except Exception:
                log.exception("%s could not be closed", type(part).__name__)


def is_fatal(error: BaseException) -> bool:
    """True for an error that concerns all rows."""
    return isinstance(error, TornError) or is_lost(error)


def is_lost(error: BaseException) -> bool:
    """True for an error after which nothing in this process can use the GPU."""
    return isinstance(error, GpuError) and error.lost
