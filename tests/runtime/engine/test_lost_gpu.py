"""A GPU that fails under its requests: who fails with it, who goes on, and that an engine without its GPU ends."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.errors import EngineClosedError, GpuError, LlmcError, ResourceError
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Batch

PATIENCE = 120
CLIENTS = 12
# Calls of every kind that the requests below make of a session, and some more: beyond them nothing fails.
CALLS = [*range(1, 40, 3), *range(40, 160, 12), 10_000]
KINDS = ("run", "reserve", "copy", "read", "write")

Alone = Callable[..., list[int]]


class Failing:
    """A session in front of another one: its n-th call raises, and every later one too if the GPU was lost.

    Attributes:
        kinds: calls that count.
        left: how many of them succeed.
        error: what is raised then.
        failed: whether it was.
        after: calls that came after the GPU was lost.
        closed: how often it was closed.
    """

    def __init__(self, inner: Any, left: int, error: Exception, kinds: Sequence[str] = KINDS) -> None:
        self._inner = inner
        self.left, self.error, self.kinds = left, error, kinds
        self.failed = False
        self.after: list[str] = []
        self.closed = 0

    @property
    def cache(self) -> "FailingCache":
        return FailingCache(self)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self.counted(name, found) if name in KINDS else found

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            lost = isinstance(self.error, GpuError) and self.error.lost
            if self.failed and lost:
                self.after.append(name)
                raise copy.copy(self.error)
            if name in self.kinds and not self.failed:
                self.failed = self.left == 0
                self.left -= 1
                if self.failed:
                    raise self.error
            return method(*arguments, **named)

        return call

    def close(self) -> None:
        self.closed += 1
        if self.failed and isinstance(self.error, GpuError) and self.error.lost:
            raise copy.copy(self.error)


class FailingCache:
    """The cache of such a session."""

    grow, read_blocks = KVCache.grow, KVCache.read_blocks

    def __init__(self, session: Failing) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session._inner.cache, name)
        return self._session.counted(name, found) if name in KINDS else found


def lost() -> GpuError:
    return GpuError("an illegal address was accessed (CUDA error 700)", lost=True)


def refused() -> GpuError:
    return GpuError("the engine did not accept a call")


def asked(first: int, max_tokens: int = 10, length: int = 5, **more: Any) -> Request:
    given = {"max_tokens": max_tokens, "temperature": 0.8, "top_k": 40, "seed": 1, "ignore_eos": True, **more}
    return Request([first + i for i in range(length)], SamplingParams(**given))


def work() -> list[Request]:
    """Requests of every shape: short and long, several outputs, beams, a cache that has to grow."""
    plain = [asked(10 + 40 * i, 4 + 3 * i, 5 + 9 * i) for i in range(CLIENTS - 3)]
    beams = asked(900, 6, num_beams=3, temperature=1.0, top_k=0)
    return [*plain, asked(600, 8, n=3), replace(beams, params=replace(beams.params, seed=None)), asked(700, 60, 210)]


def outcome(handle: Any) -> Any:
    try:
        return [list(output.token_ids) for output in handle.result(PATIENCE).outputs]
    except LlmcError as error:
        return error


@pytest.fixture
def expected(make_engine: Any) -> list[Any]:
    """What every request of :func:`work` gives where nothing fails."""
    engine = make_engine(max_context=512)
    return [outcome(engine.submit(request)) for request in work()]


def from_many_threads(engine: Engine) -> list[Any]:
    """Outcomes of :func:`work`, each submitted from a thread of its own."""
    outcomes: list[Any] = [None] * CLIENTS

    def client(i: int, request: Request) -> None:
        try:
            outcomes[i] = outcome(engine.submit(request))
        except EngineClosedError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=client, args=item) for item in enumerate(work())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a client waits for ever"
    return outcomes


def thread_of(engine: Engine) -> threading.Thread:
    assert engine._thread is not None
    return engine._thread


# ---------------------------------------------------------------------------------------------------------- a lost GPU


@pytest.mark.parametrize("calls", CALLS)
def test_wherever_the_gpu_is_lost_every_request_ends_and_so_does_the_engine(
    make_engine: Any, remembering: Any, expected: list[Any], calls: int
):
    session = Failing(remembering(), calls, lost())
    engine = make_engine(session, max_context=512, prefix_bytes=1 << 20)
    outcomes = from_many_threads(engine)
    for found, wanted in zip(outcomes, expected, strict=True):
        if isinstance(found, EngineClosedError):
            assert "the engine is closed: the GPU was lost" in str(found)
        elif isinstance(found, GpuError):
            assert found.lost
            assert "CUDA error 700)); load the bundle again in a new process" in str(found)
        else:
            assert found == wanted
    if session.failed:
        thread_of(engine).join(PATIENCE)
        assert not thread_of(engine).is_alive()
        assert session.after == []  # nothing is asked of a GPU that is gone
        assert engine._scheduler._rows._order == [] and not engine._requests
        with pytest.raises(EngineClosedError, match=r"the GPU was lost .* load the bundle again in a new process"):
            engine.submit(asked(10))
        with pytest.raises(EngineClosedError, match="the GPU was lost"):
            engine.call(lambda: None)
    else:
        assert outcomes == expected
    closed_at_once(engine, session)


def closed_at_once(engine: Engine, session: Failing) -> None:
    """Closing an engine, twice and from a thread, neither hangs nor raises, and closes the session once."""
    closing = threading.Thread(target=lambda: engine.close(then=session.close))
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    engine.close()
    assert session.closed == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_lost_in_any_kind_of_call_ends_the_engine(
    make_engine: Any, remembering: Any, expected: list[Any], kind: str
):
    session = Failing(remembering(), 1 if kind in ("run", "reserve", "copy") else 0, lost(), (kind,))
    engine = make_engine(session, max_context=512, prefix_bytes=1 << 20)
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in (*work(), *work())))
    outcomes = [outcome(handle) for handle in handles]
    assert session.failed and session.after == []
    assert any(isinstance(found, GpuError) and found.lost for found in outcomes)
    thread_of(engine).join(PATIENCE)
    assert not thread_of(engine).is_alive()


def test_those_who_wait_fail_with_those_who_run(make_engine: Any, remembering: Any):
    session = Failing(remembering(), 4, lost(), ("run",))
    engine = make_engine(session, max_batch=1)
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(asked(10 * i, 20)) for i in range(1, 8)))
    errors = [outcome(handle) for handle in handles]
    assert [type(error) for error in errors] == [GpuError] * 7
    assert engine.metrics.snapshot().requests["error"] == 7


def test_the_session_of_a_model_that_nobody_closed_before_the_loss_is_closed_afterwards(
    make_engine: Any, remembering: Any
):
    """Its thread ended long before anyone said what comes then."""
    session = Failing(remembering(), 0, lost())
    engine = make_engine(session)
    assert isinstance(outcome(engine.submit(asked(10))), GpuError)
    thread_of(engine).join(PATIENCE)
    assert session.closed == 0
    closed_at_once(engine, session)


def test_a_session_that_cannot_be_closed_for_another_reason_says_so(make_engine: Any, remembering: Any):
    engine = make_engine(remembering())

    def failing() -> None:
        raise GpuError("memory could not be freed")

    with pytest.raises(GpuError, match="memory could not be freed"):
        engine.close(then=failing)


def test_a_client_may_close_the_engine_when_it_hears_of_the_loss(make_engine: Any, remembering: Any):
    session = Failing(remembering(), 3, lost(), ("run",))
    engine = make_engine(session)
    with suppress(LlmcError):
        engine.submit(asked(10)).result(PATIENCE)
    engine.close(drain=True, then=session.close)
    assert session.closed == 1


def test_nothing_that_a_request_brought_along_outlives_a_lost_gpu(
    make_engine: Any, remembering: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("CRITICAL", "llmc.runtime.engine.engine")  # what is captured keeps its traceback

    class Brought:
        def __call__(self, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
            return logits

    session = Failing(remembering(), 5, lost(), ("run",))
    engine = make_engine(session)
    brought = Brought()
    gone = weakref.ref(brought)
    handle = engine.submit(replace(asked(10), logits_processors=(brought,)))
    error = outcome(handle)
    assert isinstance(error, GpuError) and error.__cause__ is None
    thread_of(engine).join(PATIENCE)
    error.__traceback__ = None
    session.error.__traceback__ = None
    del brought, handle
    gc.collect()
    assert gone() is None


def test_drafters_are_closed_with_an_engine_that_lost_its_gpu(make_engine: Any, remembering: Any):
    class Closing:
        costs_by_token, closed = False, False

        def propose(self, key: int, so_far: Sequence[int], count: int) -> list[int]:
            return []

        def forget(self, key: int) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    drafter = Closing()
    engine = make_engine(Failing(remembering(), 3, lost(), ("run",)), drafter=drafter)
    assert isinstance(outcome(engine.submit(asked(10))), GpuError)
    thread_of(engine).join(PATIENCE)
    assert drafter.closed


# ------------------------------------------------------------------------------------------- failures that come alone


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("make", [refused, lambda: ResourceError("the GPU is out of memory")], ids=["gpu", "memory"])
def test_a_failure_that_is_no_loss_costs_some_requests_and_never_the_engine(
    make_engine: Any, remembering: Any, expected: list[Any], calls: int, make: Callable[[], Exception]
):
    session = Failing(remembering(), calls, make())
    engine = make_engine(session, max_context=512, prefix_bytes=1 << 20)
    outcomes = from_many_threads(engine)
    for found, wanted in zip(outcomes, expected, strict=True):
        assert str(found) == str(session.error) if isinstance(found, LlmcError) else found == wanted
    assert session.failed == any(isinstance(found, LlmcError) for found in outcomes)
    assert engine._scheduler._rows._order == []
    again = [outcome(engine.submit(request)) for request in work()]
    assert again == expected
    closed_at_once(engine, session)


def held_back(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    """Submit all of them before the engine's next step."""
    handles: list[Any] = []
    engine.call(lambda: handles.extend(engine.submit(request) for request in requests))
    return [outcome(handle) for handle in handles]


def test_a_call_that_fails_costs_those_who_shared_it(make_engine: Any, remembering: Any, alone: Alone):
    """Two decode; the third is still being fed, and a fourth waits."""
    session = Failing(remembering(), 10_000, refused())
    engine = make_engine(session, max_batch=3, prefill_chunk=16, decode_steps_per_chunk=4)
    requests = [asked(10, 30), asked(100, 30), asked(200, 5, 100), asked(400, 5)]
    session._inner.before = lambda batch: fail_when(batch.input_ids.shape == (2, 1))
    outcomes = held_back(engine, requests)
    assert [str(found) for found in outcomes[:2]] == ["the engine did not accept a call"] * 2
    assert outcomes[2:] == [[alone(request.prompt, request.params)] for request in requests[2:]]


def fail_when(wrong: bool) -> None:
    if wrong:
        raise refused()


def test_of_several_calls_in_a_step_only_the_one_that_fails_costs_its_requests(
    make_engine: Any, remembering: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    """Drafts are verified in a call of their own."""

    class Always:
        def __init__(self, key: int, *_: Any) -> None:
            pass

        def drafts(self, so_far: Sequence[int], room: int, rows: int = 1) -> list[int]:
            return [1, 2, 3][:room] if so_far[0] == 100 else []

        def committed(self, proposed: int, count: int, rows: int = 1) -> None:
            pass

        def close(self, answer: Sequence[int] = ()) -> None:
            pass

    monkeypatch.setattr("llmc.runtime.engine.engine.Speculator", Always)
    session = remembering()

    def failing(batch: Batch) -> None:
        fail_when(batch.input_ids.shape[1] == 4 and int(batch.past_lengths[0]) >= 8)

    session.before = failing
    engine = make_engine(session, drafter=object.__new__(Undrafted))
    requests = [asked(10, 20), asked(100, 20), asked(200, 20)]
    first, second, third = held_back(engine, requests)
    assert isinstance(second, GpuError) and not second.lost
    assert [first, third] == [[alone(request.prompt, request.params)] for request in (requests[0], requests[2])]


class Undrafted:
    """Never asked: what speaks for it is patched."""

    name, free = "undrafted", True

    def close(self) -> None:
        pass


def test_rows_that_could_not_be_moved_cost_who_holds_one_and_nobody_who_waits(
    make_engine: Any, remembering: Any, alone: Alone
):
    """Whoever leaves has another one's positions moved: half a move is no cache to go on with."""
    session = Failing(remembering(), 0, refused(), ("copy",))
    engine = make_engine(session, max_batch=2)
    requests = [asked(10, 3), asked(100, 30), asked(200, 5)]
    first, second, third = held_back(engine, requests)
    assert session.failed
    assert isinstance(first, GpuError) and isinstance(second, GpuError)
    assert third == [alone(requests[2].prompt, requests[2].params)]


def test_memory_that_ends_while_rows_are_reserved_costs_the_request_that_needed_them(
    make_engine: Any, remembering: Any, alone: Alone
):
    session = Failing(remembering(), 2, ResourceError("the GPU is out of memory"), ("reserve",))
    engine = make_engine(session)
    requests = [asked(10, 30), asked(100, 30), asked(200, 30)]
    *served, third = held_back(engine, requests)
    assert isinstance(third, ResourceError)
    assert served == [[alone(request.prompt, request.params)] for request in requests[:2]]


# ------------------------------------------------------------------------------------------------------ planted errors


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is fatal: the engine takes a loss for a failure of one request."""
    monkeypatch.setattr("llmc.runtime.engine.engine.is_fatal", lambda error: False)
    yield


@pytest.mark.usefixtures("swallowed")
def test_an_engine_that_does_not_know_a_loss_asks_the_gpu_again(make_engine: Any, remembering: Any):
    session = Failing(remembering(), 4, lost(), ("run",))
    engine = make_engine(session, max_batch=2)
    held_back(engine, [asked(10 * i, 20) for i in range(1, 6)])
    assert session.after != []


@pytest.mark.usefixtures("swallowed")
def test_an_engine_that_does_not_know_a_torn_row_goes_on_with_it(make_engine: Any, remembering: Any):
    session = Failing(remembering(), 0, refused(), ("copy",))
    engine = make_engine(session, max_batch=2)
    requests = [asked(10, 3), asked(100, 30)]
    outcomes = held_back(engine, requests)
    assert [isinstance(found, GpuError) for found in outcomes] != [True, True]
