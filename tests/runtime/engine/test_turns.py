"""Many requests at one model: streams side by side in one thread and in many, left early, and closing among them."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from doubles.brakes import slowed

from llmc.errors import EngineClosedError
from llmc.runtime import Model, load

PATIENCE = 120  # seconds after which a thread that waits counts as waiting for ever
PROMPTS = [f"def function_{i}(x):\n    return" for i in range(8)]
# Random, so that the tokens of one request could not pass for another's.
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 2.0, "seed": 7}
# Half a minute at the pace of `slow`, in which a test must have stopped it.
LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
STEP_S = 0.02


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> list[tuple[int, ...]]:
    """The tokens that each prompt gets, one after another."""
    with load(tiny_bundle, threads=1, determinism="batch", prefix_cache_bytes=0) as model:
        return [model.generate(prompt, **SAMPLING).token_ids for prompt in PROMPTS]


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1, determinism="batch") as model:
        yield model


@pytest.fixture
def slow(model: Model) -> Model:
    slowed(model.engine, STEP_S)
    return model


def in_thread(work: Callable[[], Any]) -> Callable[[float], Any]:
    """Start ``work``; the returned function waits some seconds for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future.result


def assert_usable(model: Model, alone: list[tuple[int, ...]]) -> None:
    """From this thread and from another, and with the right tokens."""
    assert model.generate(PROMPTS[0], **SAMPLING).token_ids == alone[0]
    assert in_thread(lambda: model.generate(PROMPTS[1], **SAMPLING).token_ids)(PATIENCE) == alone[1]


# ------------------------------------------------------------------------------------------------------- side by side


def test_eight_threads_each_get_what_they_get_alone(model: Model, alone: list[tuple[int, ...]]):
    with ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def request(prompt: str) -> tuple[int, ...]:
            start.wait(PATIENCE)
            return model.generate(prompt, **SAMPLING).token_ids

        assert list(pool.map(request, PROMPTS, timeout=PATIENCE)) == alone


# ---------------------------------------------------------------------------------------------------------- left early


def test_leaving_a_for_loop_early_cancels_the_request(slow: Model, alone: list[tuple[int, ...]]):
    """At once, not when garbage is collected."""
    gc.disable()
    try:
        for _ in slow.stream(PROMPTS[0], **LONG):
            break
        assert_usable(slow, alone)
        assert slow.engine.metrics.snapshot().requests["cancelled"] == 1
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------- closing


def test_a_closed_model_refuses_requests_and_may_be_closed_again(slow: Model):
    running = slow.stream(PROMPTS[0], **LONG)
    next(running)
    slow.close()
    slow.close()
    for request in (slow.generate, slow.stream):
        with pytest.raises(EngineClosedError, match="the model is closed; load the bundle again"):
            request(PROMPTS[0])
    with pytest.raises(EngineClosedError, match="the model is closed"):
        slow.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(EngineClosedError, match="the engine was closed"):
        running.result(PATIENCE)
    assert slow.runner.session.cache.capacity == 0


def test_closing_with_drain_waits_for_the_running_requests(model: Model, alone: list[tuple[int, ...]]):
    streams = [model.stream(prompt, **SAMPLING) for prompt in PROMPTS]
    model.close(drain=True)
    assert [stream.result(0).token_ids for stream in streams] == alone


def test_requests_that_race_with_closing_are_served_or_refused_and_none_hangs(
    model: Model, alone: list[tuple[int, ...]]
):
    start = threading.Barrier(5)

    def ask(index: int) -> bool:
        start.wait(PATIENCE)
        try:
            return model.generate(PROMPTS[index], **SAMPLING).token_ids == alone[index]
        except EngineClosedError:
            return True

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, index) for index in range(4)]
        start.wait(PATIENCE)
        model.close()
        assert all(future.result(PATIENCE) for future in asked)
