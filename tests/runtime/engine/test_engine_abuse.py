"""What clients' functions, threads and processes may do to an engine, and what they may not."""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from doubles.brakes import Brake

from llmc.errors import EngineClosedError, LlmcError, ProcessorError, ResourceError, UsageError
from llmc.runtime import Model, Request, SamplingParams, load
from llmc.runtime.host import threads

PATIENCE = 120.0
PROMPT = "def area(width, height):\n    return "


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, self_test=False) as loaded:
        yield loaded


@pytest.fixture
def own(tiny_bundle: Path) -> Iterator[Model]:
    """A model that a test may break."""
    with load(tiny_bundle, self_test=False) as loaded:
        yield loaded


def serves(model: Model) -> bool:
    return len(model.stream(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).result(PATIENCE).token_ids) == 4


def companion(model: Model, *brakes: Brake) -> Any:
    return model.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True, stopping_criteria=brakes)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise error

    return function


@pytest.mark.parametrize("wait", ["generate", "result"])
def test_waiting_for_the_engine_on_its_own_threads_is_refused(model, wait):
    other = companion(model, brake := Brake(3))

    def waiting(tokens: Any, logits: Any) -> Any:
        if wait == "generate":
            model.generate(PROMPT, max_tokens=1)
        else:
            other.result()
        return logits

    beside = companion(model)  # so that processors run on the sampling threads too
    bad = model.stream(PROMPT, max_tokens=4, temperature=0, logits_processors=[waiting])
    brake.let_go()  # so the other one goes on for long after that
    with pytest.raises(LlmcError, match=r"wait|prefix cache"):
        bad.result(PATIENCE)
    assert len(beside.result(PATIENCE).token_ids) == 200


@pytest.mark.parametrize("arguments", [{"memory": "2GB"}, {"memory": -1}, {"determinism": "strict", "max_context": 2}])
def test_loading_refuses_what_could_serve_nothing(tiny_bundle, arguments):
    with pytest.raises(UsageError, match=r"memory|max_context"):
        load(tiny_bundle, self_test=False, **arguments)


def test_ended_requests_are_let_go_even_if_their_functions_know_them(model):
    class Witness:
        """Dies with the request."""

    alive = []
    for fail in (False, True):
        witness, box = Witness(), []

        def criterion(tokens: Any, text: str, witness: Any = witness, box: Any = box, fail: bool = fail) -> bool:
            if fail:
                raise ValueError(f"{witness} {box}")
            return False

        handle = model.stream(PROMPT, max_tokens=3, temperature=0, stopping_criteria=[criterion])
        box.append(handle)
        with suppress(ProcessorError):
            handle.result(PATIENCE)
        alive.append(weakref.ref(witness))
        del handle, witness, box, criterion
    assert serves(model)  # the engine's thread has left the step that they ended in
    deadline = time.monotonic() + PATIENCE
    while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [reference() for reference in alive] == [None, None]


def test_an_engine_that_nobody_holds_ends_with_its_threads(tiny_bundle, tmp_path):
    before = set(threading.enumerate())
    model = load(tiny_bundle, self_test=False, prefix_cache_folder=str(tmp_path))
    handles = [model.stream(PROMPT * 3, max_tokens=4, temperature=0, ignore_eos=True) for _ in range(2)]
    assert [len(handle.result(PATIENCE).token_ids) for handle in handles] == [4, 4]
    engine, started = weakref.ref(model.engine), set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"llmc-engine", "llmc-prefix-store"}
    del model, handles
    gc.collect()
    for thread in started:
        thread.join(PATIENCE)
    gc.collect()
    assert engine() is None and not started & set(threads._running)


@pytest.mark.threat("no-threads")
def test_a_thread_that_cannot_start_fails_its_request_and_not_the_next(make_engine, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = make_engine()
    request = Request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for attempt in (lambda: engine.submit(request), lambda: engine.call(list)):
            with pytest.raises(ResourceError, match="llmc-engine cannot be started"):
                attempt()
    assert len(engine.submit(request).result(PATIENCE).token_ids) == 2


@pytest.mark.threat("engine-failure")
def test_a_failure_that_cannot_be_recovered_from_ends_the_engine_and_leaves_nobody_waiting(make_engine, monkeypatch):
    engine = make_engine()
    request = Request([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True), stopping_criteria=[brake := Brake(3)])
    handles = [engine.submit(request), engine.submit(request)]
    next(handles[0])
    monkeypatch.setattr(engine, "_decode", raising(RuntimeError("of the step")))
    monkeypatch.setattr(engine._scheduler, "abandon", raising(MemoryError()))
    brake.let_go()
    for handle in handles:
        with pytest.raises(LlmcError, match="MemoryError"):
            handle.result(PATIENCE)
    with pytest.raises(EngineClosedError):
        engine.submit(request)


def test_a_call_of_the_library_can_be_interrupted(own):
    """Which is what Python's end does with a step that takes long."""
    handle = companion(own, brake := Brake(3))
    threads._interrupts[own.runner.session]()
    brake.let_go()
    with pytest.raises(LlmcError, match="terminate"):
        handle.result(PATIENCE)


def waited_for(child: int) -> int | None:
    """The status of a child, None for one that had to be killed."""
    deadline = time.monotonic() + PATIENCE / 4
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.threat("process-exit")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_that_its_parents_request_stayed_behind(model):
    def pieces(handle: Any) -> Any:
        async def read() -> None:
            async for _ in handle.events_async():
                pass

        return read()

    async def awaited(handle: Any) -> None:
        await handle

    ended = model.stream(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    ended.result(PATIENCE)
    handle = companion(model, brake := Brake(3))
    next(handle)
    waits: list[Callable[[], object]] = [
        lambda: model.generate([1, 2, 3], max_tokens=1),
        handle.result,
        lambda: list(handle),
        lambda: list(handle.events()),
        lambda: asyncio.run(awaited(handle)),
        lambda: asyncio.run(pieces(handle)),
        handle.cancel,
    ]
    with handle._collector._changed, ended._collector._changed:  # as a thread of the parent may have them just then
        child = os.fork()
    if child == 0:  # no pytest in here: it must not report twice
        refused = 0
        try:
            for wait in waits:
                try:
                    wait()
                except EngineClosedError:
                    refused += 1
            read = len("".join(ended)) > 0 and len(ended.result().token_ids) == 4
        finally:
            os._exit(0 if refused == len(waits) and read else 1)
    status = waited_for(child)
    brake.let_go()
    assert status == 0
    assert len(handle.result(PATIENCE).token_ids) == 200
