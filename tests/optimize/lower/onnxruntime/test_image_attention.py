"""Rows of an image see one another both ways, whatever graph they are fed to; a graph of steps is as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from doubles import towers
from doubles.lowerings import difference, open_session, relative_difference

from llmc.bundle import DECODER_FILE, Limits, read_export
from llmc.optimize.weights.store import Calibrated, Store

# As in test_lowering.py: logits up to about 20, in float32.
FLOAT_TOLERANCE = 1e-4
# As in test_int8_cache.py, as a share of the logits.
CACHE_TOLERANCE = 0.1
# Of a cache in float16: 0.0023 here.
HALF_TOLERANCE = 0.01
ROWS, CAPACITY, WIDTH = towers.GEMMA_TOKENS, 64, 64
IDS = np.random.default_rng(1).integers(3, 4000, 56)
IDS[[*range(4, 4 + ROWS), *range(30, 30 + ROWS)]] = towers.IMAGE
IMAGES = np.random.default_rng(2).normal(0, 2, (2 * ROWS, WIDTH)).astype(np.float32)
PIECES = [26, 2, 28]  # an image, none, an image


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, "gemma3") / "export"


@pytest.fixture
def lowered(seeing: Path, lowering: Any) -> Any:
    def start(calibrated: Calibrated | None = None, cache: str = "float32", **context: Any) -> Any:
        begun = lowering(seeing, calibrated=calibrated, cache=cache)
        begun.context = replace(begun.context, limits=Limits(CAPACITY, 1, CAPACITY), **context)
        return begun

    return start


def feed(folder: Path, geometry: Any, pieces: list[int], dtype: type = np.float32) -> tuple[np.ndarray, Any]:
    """Logits of all tokens, fed in pieces, and the cache after the last."""
    session = open_session(folder / DECODER_FILE)
    taken, names = {value.name for value in session.get_inputs()}, [value.name for value in session.get_outputs()]
    cache = {name: np.zeros(it.shape_of(1, CAPACITY), dtype) for it in geometry.caches for name in it.inputs}
    logits, start, seen = [], 0, 0
    for size in pieces:
        ids = IDS[None, start : start + size]
        count = int((ids == towers.IMAGE).sum())
        indices = np.full(ids.shape, -1)
        indices[ids == towers.IMAGE] = range(count)
        feeds = {"input_ids": ids, "past_lengths": np.array([start]), "logit_indices": np.arange(size)[None]}
        feeds |= {"embedding_indices": indices, "embeddings": IMAGES[seen : seen + max(1, count)]}
        feeds |= {"new_lengths": np.array([size])} if "new_lengths" in taken else {}
        for name, shape in (
            (value.name, value.shape) for value in session.get_inputs() if value.name.startswith("adapters.")
        ):
            rank = 2 * (1 + name.count("+"))  # linears that read the same share a factor
            feeds[name] = np.zeros([1, *(rank if isinstance(dim, str) else dim for dim in shape[1:])], np.float32)
        found = dict(zip(names, session.run(None, {**feeds, **cache}), strict=True))
        renamed = [pair for it in geometry.caches for pair in zip(it.inputs, it.outputs, strict=True)]
        cache = {before: found[after] for before, after in renamed}
        logits.append(found["logits"][0])
        start, seen = start + size, seen + count
    return np.concatenate(logits), cache


@pytest.fixture(scope="module")
def portable(seeing: Path) -> tuple[np.ndarray, Any]:
    return feed(seeing, read_export(seeing).geometry, [len(IDS)])


GRAPHS = [{"phase": "prefill"}, {"phase": "prefill", "ragged_rows": True}, {"phase": "shared"}]


@pytest.mark.parametrize("context", [*GRAPHS, {"phase": "decode", "overwritten": 1, "opened": True}], ids=str)
def test_images_are_seen_both_ways_as_in_the_portable_graph(lowered, portable, context):
    begun = lowered(**context)
    folder = begun.save()
    assert len(begun.nodes("If")) == len(begun.geometry.attentions)
    for pieces in (PIECES, [len(IDS)]):
        assert difference(feed(folder, begun.geometry, pieces)[0], portable[0]) < FLOAT_TOLERANCE


def test_a_graph_of_steps_has_no_branch_for_images(lowered):
    """It is never given one."""
    assert lowered(phase="decode").before("attend both ways").apply("attend both ways") == 0


@pytest.mark.parametrize("kind", ["int8", "int8-channel"])
def test_a_cache_of_integers_is_read_as_floats(lowered, portable, kind, tmp_path):
    (tmp_path / "store").mkdir()
    store = Store(tmp_path / "store")
    store.write("head", {})
    logits, cache = portable
    for layer in range(3):
        parts = {part: cache[f"past_key_values.{layer}.{part}"][0] for part in ("key", "value")}
        store.write(f"layer-{layer:03d}", {f"cache:{part}": np.abs(it).max(1) for part, it in parts.items()})
    begun = lowered(Calibrated(store), kind, phase="prefill")
    found, _ = feed(begun.save(), begun.geometry, PIECES, np.int8)
    assert relative_difference(found, logits) < CACHE_TOLERANCE


@pytest.mark.parametrize("context", GRAPHS, ids=str)
def test_a_cache_of_half_floats_is_read_as_floats(lowered, portable, context):
    begun = lowered(cache="float16", **context)
    found, _ = feed(begun.save(), begun.geometry, PIECES, np.float16)
    assert relative_difference(found, portable[0]) < HALF_TOLERANCE


def forget_those_ahead(branch: ir.Graph) -> None:
    own = next(node for node in branch if node.op_type == "Sub").inputs[0]
    next(node for node in branch if node.op_type == "LessOrEqual").replace_input_with(1, own)


def forget_the_window(branch: ir.Graph) -> None:
    both = next(node for node in branch if node.op_type == "And")
    both.outputs[0].replace_all_uses_with(both.inputs[0])


@pytest.mark.parametrize("plant", [forget_those_ahead, forget_the_window])
def test_a_planted_error_exceeds_the_tolerance(lowered, portable, plant):
    begun = lowered(phase="prefill").finish()
    plant(begun.nodes("If")[0].attributes["then_branch"].as_graph())
    found, _ = feed(begun.write(), begun.geometry, PIECES)
    assert difference(found, portable[0]) > 100 * FLOAT_TOLERANCE
    assert relative_difference(found, portable[0]) > 2 * HALF_TOLERANCE
