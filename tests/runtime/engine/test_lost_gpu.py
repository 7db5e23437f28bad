"""A GPU that fails under its requests: who fails with it, who goes on, and that an engine without its GPU ends."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmc.errors import EngineClosedError, GpuError, LlmcError, ResourceError
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.sampling.params import SamplingParams

PATIENCE = 120
CLIENTS = 12
# Calls of every kind that the requests below make of a session, and some more: beyond them nothing fails.
CALLS = [1, 7, 25, 60, 130, 10_000]
KINDS = ("run", "reserve", "copy", "swap", "read", "write")

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

    @property
    def run_ranked(self) -> Any:
        return self.run

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
    assert engine._thread.thread is not None
    return engine._thread.thread


@pytest.mark.parametrize("calls", CALLS)
def test_wherever_the_gpu_is_lost_every_request_ends_and_so_does_the_engine(make_engine, remembering, expected, calls):
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


def test_the_session_of_a_model_that_nobody_closed_before_the_loss_is_closed_afterwards(make_engine, remembering):
    """Its thread ended long before anyone said what comes then."""
    session = Failing(remembering(), 0, lost())
    engine = make_engine(session)
    assert isinstance(outcome(engine.submit(asked(10))), GpuError)
    thread_of(engine).join(PATIENCE)
    assert session.closed == 0
    closed_at_once(engine, session)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("make", [refused, lambda: ResourceError("the GPU is out of memory")], ids=["gpu", "memory"])
def test_a_failure_that_is_no_loss_costs_some_requests_and_never_the_engine(
    make_engine, remembering, expected, calls, make
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


def test_a_call_that_fails_costs_those_who_shared_it(make_engine, remembering, alone):
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


def test_rows_that_could_not_be_moved_cost_who_holds_one_and_nobody_who_waits(make_engine, remembering, alone):
    """Whoever leaves has another one's positions moved: half a move is no cache to go on with."""
    session = Failing(remembering(), 0, refused(), ("swap",))
    engine = make_engine(session, max_batch=2)
    requests = [asked(10, 3), asked(100, 30), asked(200, 5)]
    first, second, third = held_back(engine, requests)
    assert session.failed
    assert isinstance(first, GpuError) and isinstance(second, GpuError)
    assert third == [alone(requests[2].prompt, requests[2].params)]


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is fatal: the engine takes a loss for a failure of one request."""
    monkeypatch.setattr("llmc.runtime.engine.engine.is_fatal", lambda error: False)
    yield


@pytest.mark.usefixtures("swallowed")
def test_an_engine_that_does_not_know_a_loss_asks_the_gpu_again(make_engine, remembering):
    session = Failing(remembering(), 4, lost(), ("run",))
    engine = make_engine(session, max_batch=2)
    held_back(engine, [asked(10 * i, 20) for i in range(1, 6)])
    assert session.after != []


@pytest.mark.usefixtures("swallowed")
def test_an_engine_that_does_not_know_a_torn_row_goes_on_with_it(make_engine, remembering):
    session = Failing(remembering(), 0, refused(), ("swap",))
    engine = make_engine(session, max_batch=2)
    requests = [asked(10, 3), asked(100, 30)]
    outcomes = held_back(engine, requests)
    assert [isinstance(found, GpuError) for found in outcomes] != [True, True]
