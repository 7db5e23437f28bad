"""ONNX Runtime behind the seam: rows, bindings, fallbacks, and every way in which it refuses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from doubles.caches import read
from onnx import numpy_helper, parser

from llmc.bundle import Manifest, read_bundle
from llmc.runtime.runner.prefill import batch
from llmc.runtime.sessions import Batch, Phase, Session, open_session
from llmc.runtime.sessions.onnxruntime import binding
from llmc.runtime.sessions.onnxruntime.library import inference_session, session_options

# Largest difference of logits between a row of a batch and the same row alone, in standard deviations of the logits.
# MatMulNBits adds the products of two rows at once in another order than those of one; where that moves an activation
# over a rounding edge of int8, logits move by about 0.01 deviations. In float32 nothing amplifies it.
ROW_TOLERANCE = {"int8": 0.1, "fp32": 1e-4}
ROWS = 3
GENERATOR = np.random.default_rng(0)
PROMPTS = [GENERATOR.integers(3, 4096, length).tolist() for length in (5, 260, 37)]
ANSWERS = [GENERATOR.integers(3, 4096, 6).tolist() for _ in PROMPTS]


@pytest.fixture(scope="module", params=["tiny_bundle", "fp32_bundle"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Session, Manifest]]:
    """A session with room for three rows, in both precisions."""
    folder = request.getfixturevalue(request.param)
    manifest = with_rows(read_bundle(folder))
    session = open_session(folder, manifest, 1)
    session.cache.reserve(ROWS, 512)
    yield session, manifest
    session.close()


@pytest.fixture
def session(split_bundle: Path) -> Iterator[Session]:
    """A fresh int8 session of two graphs with room for three rows."""
    session = open_session(split_bundle, with_rows(read_bundle(split_bundle)), 1)
    session.cache.reserve(ROWS, 256)
    yield session
    session.close()


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the arrays that are bound from now on."""
    names: list[str] = []
    bind = binding.bind

    def spy(target: Callable[..., None], name: str, array: np.ndarray) -> None:
        names.append(name)
        bind(target, name, array)

    monkeypatch.setattr(binding, "bind", spy)
    return names


def with_rows(manifest: Manifest) -> Manifest:
    """The graphs do not know how many rows the cache has; only the limit does."""
    return replace(manifest, limits=replace(manifest.limits, max_batch=ROWS))


def prefill(session: Session, prompt: list[int], row: int = 0) -> np.ndarray:
    call = batch(Phase.PREFILL, np.array([prompt]), [0], [len(prompt) - 1])
    return session.run(replace(call, first_row=row))[0, 0].copy()


def decode(session: Session, tokens: list[int], past: list[int], first_row: int = 0) -> np.ndarray:
    ids, zeros = np.array(tokens, np.int64)[:, None], np.zeros((len(tokens), 1), np.int64)
    return session.run(Batch.of(Phase.DECODE, ids, np.array(past, np.int64), zeros, first_row))[:, 0].copy()


def together(session: Session, mixed_up: bool = False) -> np.ndarray:
    """Logits [row, step, V] of all prompts in their own rows, then decoded as one ragged batch."""
    steps = [[prefill(session, prompt, row) for row, prompt in enumerate(PROMPTS)]]
    for i in range(len(ANSWERS[0])):
        past = [len(prompt) + i for prompt in PROMPTS]
        past = past[::-1] if mixed_up else past
        steps.append(decode(session, [answer[i] for answer in ANSWERS], past))
    return np.array(steps).transpose(1, 0, 2)


def one_by_one(session: Session) -> np.ndarray:
    """The same, each prompt alone in row 0."""
    rows = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        rows.append([prefill(session, prompt)])
        rows[-1] += [decode(session, [token], [len(prompt) + i])[0] for i, token in enumerate(answer)]
    return np.array(rows)


def deviation(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / wanted.std())


def prefill_together(session: Session, mixed_up: bool = False) -> np.ndarray:
    """Logits [row, V] of all prompts, fed in one call."""
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.zeros((ROWS, max(lengths)), np.int64)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = lengths[::-1] if mixed_up else lengths
    call = Batch.of(Phase.PREFILL, ids, np.zeros(ROWS, np.int64), lengths[:, None] - 1, new_lengths=lengths)
    return session.run(call)[:, 0].copy()


def test_products_of_the_largest_integers_are_exact_on_every_cpu():
    """Two exceed 16 bits, in which x86 without VNNI adds if it is not told otherwise: of this sum it loses 99 %."""
    weights = np.full((256, 32), 127, np.int8)
    model = parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    product (uint8[M,256] x) => (float[M,32] y) {
      one = Constant<value_float=1.0>()
      y = com.microsoft.MatMulIntegerToFloat(x, W, one, one, middle)
    }""")
    model.graph.initializer.extend(
        [numpy_helper.from_array(weights, "W"), numpy_helper.from_array(np.uint8(128), "middle")]
    )
    opened = inference_session(onnxruntime, model.SerializeToString(), session_options(onnxruntime, 1))
    for rows in (1, 4, 64):
        assert (opened.run(None, {"x": np.full((rows, 256), 255, np.uint8)})[0] == 127 * 127 * 256).all()


def test_prompts_in_one_call_equal_prompts_alone(session):
    if not session.packs_rows:
        pytest.skip("this engine takes no rows of different lengths")
    session.cache.reserve(ROWS, 512)
    wanted = one_by_one(session)[:, :2]
    first = prefill_together(session)
    then = decode(session, [answer[0] for answer in ANSWERS], [len(prompt) for prompt in PROMPTS])
    assert deviation(np.stack([first, then], 1), wanted) <= ROW_TOLERANCE["int8"]
    assert deviation(prefill_together(session, mixed_up=True), wanted[:, 0]) > 10 * ROW_TOLERANCE["int8"]


def test_a_ragged_batch_equals_its_rows_one_by_one(opened):
    session, manifest = opened
    found, wanted = together(session), one_by_one(session)
    assert np.array_equal(found[:, 0], wanted[:, 0])  # each prompt was fed alone, to its row
    assert deviation(found, wanted) <= ROW_TOLERANCE[manifest.recipe.precision]


def test_the_tolerance_for_rows_notices_lengths_that_are_mixed_up(opened):
    session, manifest = opened
    assert deviation(together(session, mixed_up=True), one_by_one(session)) > ROW_TOLERANCE[manifest.recipe.precision]


def contents(session: Session) -> list[np.ndarray]:
    return [read(session.cache, row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS)]


def test_nothing_is_bound_again_from_step_to_step(session, binds):
    prefill(session, PROMPTS[0])
    decode(session, [5], [5])
    common = [name for name in binds if name != "new_lengths"]  # which only the graph of prefill may take
    assert len(common) == 2 * len(set(common))  # once for each of the two shapes of call
    assert binds.count("new_lengths") == session.packs_rows
    assert {"input_ids", "past_lengths", "logit_indices", "logits", "present.0.key"} < set(binds)
    binds.clear()
    for position in range(6, 30):
        decode(session, [5], [position])
    assert binds == []
    prefill(session, PROMPTS[2])
    binds.clear()
    decode(session, [5], [37])
    assert binds == []


def test_short_calls_of_many_shapes_stay_bound_and_share_memory_for_their_logits(session, binds):
    prefill(session, PROMPTS[2])

    def verify(tokens: int) -> np.ndarray:
        ids, indices = np.array([PROMPTS[0][:tokens]]), np.arange(tokens)[None]
        return session.run(Batch.of(Phase.DECODE, ids, np.array([37]), indices))

    all_logits = [verify(tokens) for tokens in (2, 3, 5)] + [decode_in_place(session, rows) for rows in (1, 2, 3)]
    assert all(np.shares_memory(logits, all_logits[0]) for logits in all_logits)
    binds.clear()
    for _ in range(2):
        for tokens in (2, 3, 5):
            verify(tokens)
        prefill(session, PROMPTS[2], row=1)
        decode_in_place(session, 3)
    assert "present.0.key" in binds
    assert binds.count("logits") == 1  # the prefill's alone, once


def decode_in_place(session: Session, rows: int) -> np.ndarray:
    zeros = np.zeros((rows, 1), np.int64)
    return session.run(Batch.of(Phase.DECODE, zeros + 7, zeros[:, 0] + 37, zeros))


def test_growth_binds_anew_and_keeps_the_contents(session, binds):
    prefill(session, PROMPTS[2], row=1)
    want = decode(session, [7], [37], first_row=1)
    binds.clear()
    session.cache.reserve(ROWS, 512)
    assert np.array_equal(decode(session, [7], [37], first_row=1), want)
    assert len(binds) == len(set(binds)) > 4
