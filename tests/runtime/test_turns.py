"""Requests take turns: many threads at one model, streams that are left early, and closing in the middle of it all."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting  # the built-in one only since Python 3.11
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime import Model, load
from llmc.runtime.sampling import Choice, GreedySampler
from llmc.runtime.sessions import Batch

PATIENCE = 60  # seconds after which a thread that waits counts as waiting for ever
MOMENT = 0.1  # seconds in which a thread that need not wait would have got on
PROMPTS = [f"def function_{i}(x):\n    return" for i in range(8)]
# Random, so that the tokens of one request could not pass for another's.
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 2.0, "seed": 7}


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> list[tuple[int, ...]]:
    """The tokens that each prompt gets from a model of its own."""
    answers = []
    for prompt in PROMPTS:
        with load(tiny_bundle, threads=1) as model:
            answers.append(model.generate(prompt, **SAMPLING).token_ids)
    return answers


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


# ------------------------------------------------------------------------------------------------------------ threads


def test_eight_threads_each_get_what_they_get_alone(model: Model, alone: list[tuple[int, ...]]):
    with ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def request(prompt: str) -> tuple[int, ...]:
            start.wait(PATIENCE)
            return model.generate(prompt, **SAMPLING).token_ids

        assert list(pool.map(request, PROMPTS, timeout=PATIENCE)) == alone


def test_another_thread_waits_until_the_stream_ends(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    result = in_thread(lambda: model.generate(PROMPTS[1], **SAMPLING).token_ids)
    with pytest.raises(StillWaiting):
        result(MOMENT)
    assert stream.finish().token_ids == alone[0]
    assert result(PATIENCE) == alone[1]


def test_a_second_stream_of_the_same_thread_is_refused_instead_of_waiting(model: Model, alone: list[tuple[int, ...]]):
    first, second = (model.stream(prompt, **SAMPLING) for prompt in PROMPTS[:2])
    next(first)
    with pytest.raises(RequestError, match="another stream of this thread is still open; use it up or close it"):
        next(second)
    with pytest.raises(RequestError, match="still open"):
        model.generate(PROMPTS[1], **SAMPLING)
    assert first.finish().token_ids == alone[0]
    assert_usable(model, alone)


def test_a_stream_may_be_used_up_by_another_thread(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    assert in_thread(lambda: stream.finish().token_ids)(PATIENCE) == alone[0]
    assert_usable(model, alone)


def test_a_stream_that_was_never_begun_holds_nothing(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    assert_usable(model, alone)
    stream.close()


# ------------------------------------------------------------------------------------------------------- left early


def test_a_closed_stream_lets_the_next_request_in(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert_usable(model, alone)


def test_leaving_a_for_loop_early_lets_the_next_request_in(model: Model, alone: list[tuple[int, ...]]):
    """At once, not when garbage is collected: another thread would wait for that for ever."""
    gc.disable()
    try:
        for _ in model.stream(PROMPTS[0], **SAMPLING):
            break
        assert_usable(model, alone)
    finally:
        gc.enable()


def test_closing_a_stream_that_another_thread_runs_is_refused(
    model: Model, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
):
    running, closed = threading.Event(), threading.Event()
    run = model.runner.session.run

    def slow(batch: Batch) -> np.ndarray:
        running.set()
        closed.wait(PATIENCE)
        return run(batch)

    monkeypatch.setattr(model.runner.session, "run", slow)
    stream = model.stream(PROMPTS[0], **SAMPLING)
    result = in_thread(lambda: stream.finish().token_ids)
    running.wait(PATIENCE)
    with pytest.raises(RequestError, match="computing its next item; close it after that"):
        stream.close()
    closed.set()
    assert result(PATIENCE) == alone[0]


def test_ctrl_c_while_streaming_leaves_the_model_usable(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream._parts.throw(KeyboardInterrupt)
    assert_usable(model, alone)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RequestError, ZeroDivisionError])
def test_an_error_between_two_steps_leaves_the_model_usable(
    model: Model, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    class Failing(GreedySampler):
        def __call__(self, logits: np.ndarray, tokens: Sequence[int]) -> Choice:
            if len(tokens) > 14:
                raise error
            return super().__call__(logits, tokens)

    with monkeypatch.context() as patch:
        patch.setattr("llmc.runtime.model.make_sampler", lambda *_, **__: Failing())
        with pytest.raises(error):
            model.generate(PROMPTS[0], max_tokens=12)
    assert_usable(model, alone)


# ------------------------------------------------------------------------------------------------------------ closing


def test_a_closed_model_refuses_requests_and_may_be_closed_again(model: Model):
    started_late = model.stream(PROMPTS[0], **SAMPLING)
    model.close()
    model.close()
    for request in (model.generate, model.stream):
        with pytest.raises(RequestError, match="the model is closed; load the bundle again"):
            request(PROMPTS[0])
    with pytest.raises(RequestError, match="the model is closed"):
        model.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(RequestError, match="the model is closed"):
        next(started_late)
    assert model.runner.session.capacity == 0


def test_leaving_the_with_block_closes_the_model(tiny_bundle: Path):
    with pytest.raises(ZeroDivisionError), load(tiny_bundle, threads=1) as model:
        raise ZeroDivisionError
    with pytest.raises(RequestError, match="the model is closed"):
        model.generate(PROMPTS[0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_leaving_the_with_block_ends_an_open_stream_and_passes_the_error_on(
    tiny_bundle: Path, error: type[BaseException]
):
    with pytest.raises(error), load(tiny_bundle, threads=1) as model:
        stream = model.stream(PROMPTS[0], **SAMPLING)
        next(stream)
        raise error
    assert list(stream) == []
    with pytest.raises(RequestError, match="the model is closed"):
        model.generate(PROMPTS[0])


def test_closing_waits_for_the_running_request(model: Model, alone: list[tuple[int, ...]]):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    closed = in_thread(model.close)
    with pytest.raises(StillWaiting):
        closed(MOMENT)
    assert stream.finish().token_ids == alone[0]
    closed(PATIENCE)
    with pytest.raises(RequestError, match="the model is closed"):
        model.generate(PROMPTS[0])


def test_a_request_that_waited_until_the_model_was_closed_is_refused(model: Model):
    stream = model.stream(PROMPTS[0], **SAMPLING)
    next(stream)
    closed = in_thread(model.close)
    time.sleep(MOMENT)
    waiting = in_thread(lambda: model.stream(PROMPTS[1], **SAMPLING).finish())
    time.sleep(MOMENT)
    stream.close()
    closed(PATIENCE)
    # Whoever comes first is served; nobody waits for ever or reaches a closed engine.
    try:
        assert len(waiting(PATIENCE).token_ids) > 0
    except RequestError as error:
        assert "the model is closed" in str(error)
