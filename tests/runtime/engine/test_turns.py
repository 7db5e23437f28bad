"""Many requests at one model: streams side by side in one thread and in many, left early, and closing among them."""

import threading
from collections.abc import Iterator
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


def test_eight_threads_each_get_what_they_get_alone(model, alone):
    with ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def request(prompt: str) -> tuple[int, ...]:
            start.wait(PATIENCE)
            return model.generate(prompt, **SAMPLING).token_ids

        assert list(pool.map(request, PROMPTS, timeout=PATIENCE)) == alone


def test_a_closed_model_refuses_requests_and_may_be_closed_again(slow):
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


def test_requests_that_race_with_closing_are_served_or_refused_and_none_hangs(model, alone):
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
