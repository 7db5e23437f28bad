"""Prefill in chunks and steps on the real engine: where a prompt is cut does not show in the logits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from llmc.bundle import Manifest, read_bundle
from llmc.runtime.kv.rows import Slot
from llmc.runtime.runner.prefill import ATTENTION_TILE, SingleRunner, prefill
from llmc.runtime.sessions import Batch, Phase, Session, open_session

# float32 sums over other shapes of call round otherwise: 2e-6 was seen on logits with a deviation of about 1.
FP32_TOLERANCE = 1e-4
LONG = np.random.default_rng(0).integers(3, 4096, 300).tolist()


@pytest.fixture(scope="module", params=["tiny_bundle", "tiny_bundle without its prefill graph", "fp32_bundle"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[str, Session, Manifest]]:
    """Both precisions, and weight-only prefill, on their real engine: precision, session, manifest."""
    fixture, _, decode_only = request.param.partition(" ")
    folder = request.getfixturevalue(fixture)
    manifest = read_bundle(folder)
    if decode_only:
        manifest = replace(manifest, graphs=dict.fromkeys(("prefill", "decode"), manifest.graphs["decode"]))
    session = open_session(folder, manifest, 1)
    yield manifest.recipe.precision, session, manifest
    session.close()


def generated(runner: SingleRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The most probable token after ``prompt``, and so on, ``count`` of them."""
    logits, tokens = runner.prefill(prompt), []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(int(logits[0, -1].argmax()))
        logits = runner.step(tokens[-1], position)
    return tokens


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each call that feeds a prompt."""
    found: list[tuple[int, int]] = []

    def run(call: Batch) -> np.ndarray:
        start = int(call.past_lengths[0])
        found.append((start, start + call.input_ids.shape[1]))
        return np.zeros((1, call.logit_indices.shape[1], 1), np.float32)

    list(prefill(run, Slot(range(length), row=0), size))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64, 65, 66, 512])
def test_chunks_follow_one_another_and_none_is_of_a_length_that_rounds_otherwise(size):
    """Kernels round otherwise for one token, the odd one of pairs and the one after tiles of 64 queries."""
    assert chunks(1, size) == [(0, 1)]
    for length in range(2, 200):
        parts = chunks(length, size)
        assert [token for start, end in parts for token in range(start, end)] == list(range(length))
        assert all((end - start) % 2 == 0 for start, end in parts[:-1])
        assert all(2 <= end - start <= max(2, size) + 1 for start, end in parts)
        assert all((end - start) % ATTENTION_TILE != 1 for start, end in parts)


# Lengths, and sizes of the chunks that they are fed in: each is cut amid and behind tiles of 64.
CUTS = {65: (2,), 129: (17, 66), 300: (99, 256)}


def test_the_real_engine_gives_the_same_logits_for_any_chunk_size(opened):
    """W8A8 is exact per token, so int8 is equal bit by bit, and so is MatMulNBits where even chunks come first.

    65 and 129 tokens in one call would leave one query after tiles of 64: logits of int8 then differ by up to 0.09.
    """
    precision, session, _ = opened
    for length, sizes in CUTS.items():
        whole = SingleRunner(session, 512, 512).prefill(LONG[:length]).copy()
        for size in sizes:
            chunked = SingleRunner(session, 512, size).prefill(LONG[:length])
            difference = float(np.abs(chunked - whole).max())
            assert difference <= (0.0 if precision == "int8" else FP32_TOLERANCE), (length, size)


def test_the_tolerance_for_chunks_notices_a_token_fed_twice(fp32_bundle):
    manifest = read_bundle(fp32_bundle)
    session = open_session(fp32_bundle, manifest, 1)
    runner = SingleRunner(session, 512, 512)
    right = runner.prefill(LONG).copy()
    wrong = runner.prefill([*LONG[:100], LONG[99], *LONG[100:]])
    session.close()
    assert np.abs(wrong - right).max() > 10 * FP32_TOLERANCE


def test_evaluation_logits_are_those_of_the_steps(opened):
    _, session, manifest = opened
    runner = SingleRunner(session, 512, 16)
    ids = LONG[:40]
    every = {phase: runner.logits(ids, phase) for phase in Phase}
    # The head sees 16 rows instead of one, and adds in another order.
    assert np.abs(every[Phase.PREFILL][-1] - runner.prefill(ids)[0, 0]).max() <= FP32_TOLERANCE
    stepped = [runner.step(token, position)[0, 0].copy() for position, token in enumerate(ids)]
    assert np.array_equal(every[Phase.DECODE], np.array(stepped))
    assert {logits.shape for logits in every.values()} == {(40, manifest.geometry.vocab_size)}


def test_what_an_earlier_request_left_in_the_cache_is_never_read(tiny_bundle):
    """Not even times zero: NaN would show."""
    manifest = read_bundle(tiny_bundle)
    session = open_session(tiny_bundle, manifest, 1)
    runner = SingleRunner(session, 512, 16)
    clean = generated(runner, LONG[:40], 8)
    for tensor in session.cache.arrays:
        tensor.fill(np.nan)
    assert generated(runner, LONG[:40], 8) == clean
    session.close()
