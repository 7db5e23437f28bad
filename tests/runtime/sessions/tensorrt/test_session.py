"""TensorRT behind the seam, on doubles that enforce its rules: the same logits as ONNX Runtime, whatever the call."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from doubles.cuda import ORIN

from llmc.errors import GpuError, LlmcError, ResourceError
from llmc.runtime.sessions import Batch, Phase, Session
from llmc.runtime.sessions.tensorrt.session import TensorRTSession

# Largest difference of logits between the double, which attends to a bucket, and ONNX Runtime alone, which attends to
# the whole cache: sums of other lengths round otherwise.
TOLERANCE = {"float32": 1e-4, "float16": 0.15}
VOCAB = 4096
GENERATOR = np.random.default_rng(0)
PROMPTS = [GENERATOR.integers(3, VOCAB, length).tolist() for length in (5, 11, 23)]
ANSWERS = [GENERATOR.integers(3, VOCAB, 12).tolist() for _ in PROMPTS]


def call(session: Session, tokens: Any, past: Any, outputs: Any, row: int = 0) -> np.ndarray:
    ids = np.array(tokens, np.int64)
    phase = Phase.DECODE if ids.shape[1] == 1 else Phase.PREFILL
    indices = np.array(outputs, np.int64).reshape(len(ids), -1)
    return session.run(Batch.of(phase, ids, np.array(past, np.int64), indices, row))


def prefill(session: Session, prompt: list[int], row: int = 0, past: int = 0) -> np.ndarray:
    return call(session, [prompt], [past], [[len(prompt) - 1]], row)[0, 0].copy()


def decode(session: Session, tokens: list[int], past: list[int], row: int = 0) -> np.ndarray:
    return call(session, [[token] for token in tokens], past, [[0]] * len(tokens), row)[:, 0].copy()


def together(session: Session, mixed_up: bool = False) -> np.ndarray:
    """Logits [step, row, V] of all prompts in their own rows, then decoded as one ragged batch."""
    session.cache.reserve(3, 40)
    steps = [np.array([prefill(session, prompt, row) for row, prompt in enumerate(PROMPTS)])]
    for i in range(len(ANSWERS[0])):
        past = [len(prompt) + i for prompt in PROMPTS]
        steps.append(decode(session, [answer[i] for answer in ANSWERS], past[::-1] if mixed_up else past))
    return np.array(steps)


@pytest.fixture(params=TOLERANCE)
def both(request: pytest.FixtureRequest, bundle: Callable[..., Any]) -> Iterator[tuple[Session, Session, float]]:
    """The session on doubles, ONNX Runtime's on the same graph, and how far they may be apart."""
    compute = request.param
    setup = bundle(compute)
    session, reference = setup.open(), setup.reference()
    session.cache.reserve(3, 40)
    reference.cache.reserve(3, 64)
    yield session, reference, TOLERANCE[compute]
    session.close()
    reference.close()
    assert setup.driver.leaks == []
    assert setup.driver.closed


def test_prompts_and_ragged_steps_give_the_logits_of_onnx_runtime(both: tuple[Session, Session, float]):
    session, reference, tolerance = both
    assert np.abs(together(session) - together(reference)).max() <= tolerance


def test_the_tolerance_notices_lengths_that_are_mixed_up(both: tuple[Session, Session, float]):
    session, reference, tolerance = both
    assert np.abs(together(session, mixed_up=True) - together(reference)).max() > tolerance


def test_drafts_are_verified_row_by_row_and_equal_single_steps(both: tuple[Session, Session, float]):
    session, reference, tolerance = both
    for each in (session, reference):
        for row in range(3):
            prefill(each, PROMPTS[1], row)
    ids, past = [answer[:3] for answer in ANSWERS], [len(PROMPTS[1])] * 3
    logits = call(session, ids, past, [[0, 1, 2]] * 3).copy()
    assert logits.shape == (3, 3, VOCAB)
    for i in range(3):
        single = decode(reference, [tokens[i] for tokens in ids], [past[0] + i] * 3)
        assert np.abs(logits[:, i] - single).max() <= tolerance


def test_more_tokens_than_the_profile_takes_are_fed_in_chunks(both: tuple[Session, Session, float]):
    session, reference, tolerance = both
    long = GENERATOR.integers(3, VOCAB, 40).tolist()
    assert np.abs(prefill(session, long) - prefill(reference, long)).max() <= tolerance
    assert np.abs(decode(session, [3], [39]) - decode(reference, [3], [39])).max() <= tolerance


def test_logits_at_any_places_come_back(session: TensorRTSession, bundle: Any):
    reference = bundle().reference()
    reference.cache.reserve(1, 64)
    wanted, found = (call(each, [PROMPTS[2]], [0], [[0, 3, 4, 5, 20]]) for each in (reference, session))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE["float32"]
    assert np.abs(session.cache.read(0, 0, 23) - reference.cache.read(0, 0, 23)).max() <= TOLERANCE["float32"]


def test_more_rows_than_the_profile_takes_are_served_in_turns(bundle: Callable[..., Any]):
    setup = bundle()
    session, reference = setup.open(), setup.reference()
    for each in (session, reference):
        each.cache.reserve(4, 40)
    found, wanted = (decode(each, [3, 4, 5, 6], [0, 0, 0, 0]) for each in (session, reference))
    assert np.abs(found - wanted).max() <= TOLERANCE["float32"]
    assert [shapes["input_ids"] for shapes in setup.library.contexts[0].history] == [(3, 1), (1, 1)]


# ------------------------------------------------------------------------------------------------ cache and limits


def test_attention_looks_at_the_smallest_bucket_that_is_enough(bundle: Callable[..., Any]):
    setup = bundle()
    session = setup.open()
    session._steps.records = False
    session.cache.reserve(2, 64)
    for past in (0, 15, 16, 31, 32, 63):
        decode(session, [1], [past])
    decode(session, [1, 1], [3, 20])
    looked_at = [shapes["cache_slots"][0] for shapes in setup.library.contexts[0].history]
    assert looked_at == [16, 16, 32, 32, 64, 64, 32]


# --------------------------------------------------------------------------------------------------------- recording


def test_a_step_is_recorded_after_its_second_run_and_then_only_launched(bundle: Callable[..., Any]):
    setup = bundle()
    session, driver = setup.open(), setup.driver
    session.cache.reserve(1, 16)
    counts = []
    for past in range(6):
        decode(session, [past], [past])
        counts.append((driver.calls["begin_capture"], driver.calls["launch"], setup.library.runs))
    assert counts == [(0, 0, 1), (1, 0, 3), (1, 1, 3), (1, 2, 3), (1, 3, 3), (1, 4, 3)]
    before = driver.calls.copy()
    session.run_ranked(Batch.of(Phase.DECODE, np.array([[1]]), np.array([6]), np.zeros((1, 1), np.int64)))
    assert {name for name in driver.calls if driver.calls[name] > before[name]} == {"activate", "launch", "synchronize"}


def test_steps_that_alternate_are_recorded_and_equal_plain_ones(bundle: Callable[..., Any]):
    """No step follows one of its own shapes, and recorded ones lie between the visits of others."""
    found = []
    for records in (True, False):
        setup = bundle()
        session = setup.open()
        session._steps.records = records
        session.cache.reserve(3, 64)
        for past in range(5):
            for rows in (1, 2, 3)[: 2 + (past > 1)]:
                found += [decode(session, [past + 1] * rows, [past] * rows)]
            prefill(session, PROMPTS[2], row=2)  # two chunks of its own length
        counts = (setup.driver.calls["begin_capture"], setup.driver.calls["launch"])
        assert counts == ((3 + 2, 3 + 3 + 1 + 3 + 3) if records else (0, 0))
    half = len(found) // 2
    assert all(np.array_equal(*pair) for pair in zip(found[:half], found[half:], strict=True))


def test_a_library_that_cannot_be_recorded_is_run_plainly(bundle: Callable[..., Any]):
    setup = bundle()
    setup.library.capturable = False
    session = setup.open()
    session.cache.reserve(1, 16)
    want = [decode(session, [past], [past]) for past in range(4)]
    assert setup.driver.calls["begin_capture"] == 0
    setup = bundle()
    setup.library.capturable = True
    other = setup.open()
    other.cache.reserve(1, 16)
    assert np.array_equal([decode(other, [past], [past]) for past in range(4)], want)
    assert setup.driver.calls["launch"] == 2


@pytest.mark.parametrize("error", [None, ResourceError("no memory is left"), GpuError("it cannot be instantiated")])
def test_a_recording_that_fails_is_not_tried_again(
    bundle: Callable[..., Any], caplog: pytest.LogCaptureFixture, error: LlmcError | None
):
    """The library refuses the run that is recorded, or the driver the recording, as for want of memory."""
    setup = bundle()
    session, end = setup.open(), setup.driver.end_capture
    session.cache.reserve(1, 16)
    if error is None:
        setup.library.fails_at = 3
    else:

        def fail(stream: int) -> int:
            setup.driver.destroy_graph(end(stream))
            raise error

        setup.driver.end_capture = fail
    found = [decode(session, [past], [past]) for past in range(4)]
    assert "recording a CUDA graph failed" in caplog.text
    assert (setup.driver.calls["begin_capture"], setup.driver.calls["launch"]) == (1, 0)
    fresh = bundle().open()
    fresh.cache.reserve(1, 16)
    assert np.array_equal(found, [decode(fresh, [past], [past]) for past in range(4)])


# ------------------------------------------------------------------------------------------------- swapped, integrated


def test_an_integrated_gpu_works_on_the_hosts_memory(bundle: Callable[..., Any]):
    setup = bundle(device=ORIN)
    session = setup.open()
    want = together(bundle().open())
    before = setup.driver.calls["copy"]
    assert np.array_equal(together(session), want)
    assert setup.driver.calls["copy"] == before
    session.close()
    assert setup.driver.leaks == []
