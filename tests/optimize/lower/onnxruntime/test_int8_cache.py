"""An int8 KV cache: the graph agrees with that of a float cache."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import relative_difference

from llmc.bundle import read_export
from llmc.optimize.weights.store import Calibrated, Store

pytest.importorskip("onnxruntime", "1.31", reason="older engines know no quantized cache")

# Root mean square of the difference over that of the logits: keys and values with 255 steps, through two layers of
# random weights whose attention is nearly a choice of one position, cost 1 to 4 %. A scale 16 times off costs more.
CACHE_TOLERANCE = 0.1

BIASES, UNTIED, TIED = "llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded"
SINKS = "gpt_oss-sinks-clamped-experts-bf16"
KINDS = ["int8", "int8-channel"]
PIECES = [7, 1, 12]


def ranges(case, decoder, ids: list[int], folder: Path) -> Store:
    """A store with the range of each channel of keys and values on ``ids``."""
    geometry = read_export(case.export).geometry
    graph = decoder(case.export, geometry)
    _, cache = graph.run([ids], [0], graph.empty_cache())
    folder.mkdir()
    store = Store(folder)
    store.write("head", {})
    for layer in range(geometry.layers):
        parts = {part: cache[f"past_key_values.{layer}.{part}"][0] for part in ("key", "value")}
        store.write(f"layer-{layer:03d}", {f"cache:{part}": np.abs(found).max(1) for part, found in parts.items()})
    return store


def in_pieces(graph, ids: list[int], pieces: list[int], dtype: type = np.int8) -> tuple[np.ndarray, dict]:
    cache = {name: array.astype(dtype) for name, array in graph.empty_cache().items()}
    outputs, position = [], 0
    for size in pieces:
        logits, cache = graph.run([ids[position : position + size]], [position], cache)
        outputs.append(logits[0])
        position += size
    return np.concatenate(outputs), cache


@pytest.fixture
def quantized(exported, lowering, decoder, ids, tmp_path):
    """A case in float32 with an int8 cache of some kind, lowered and not yet written."""

    def start(name: str, kind: str, **options):
        store = ranges(exported(name), decoder, ids, tmp_path / "ranges")
        lowered = lowering(exported(name).export, calibrated=Calibrated(store), cache=kind, **options)
        lowered.apply("remove dead nodes")
        return lowered

    return start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [BIASES, UNTIED, TIED, SINKS])
@pytest.mark.parametrize("pieces", [PIECES, [1] * 20], ids=str)
def test_logits_are_close_to_the_float_cache(quantized, exported, decoder, portable_logits, ids, name, kind, pieces):
    lowered = quantized(name, kind)
    found, cache = in_pieces(decoder(lowered.write(), lowered.geometry), ids, pieces)
    assert relative_difference(found, portable_logits(exported(name))) <= CACHE_TOLERANCE
    assert {array.dtype for array in cache.values()} == {np.dtype(np.int8)}
    # The second layer's ranges were seen behind a float cache in the first.
    assert all(np.abs(array[:, :, : len(ids)].astype(int)).max() > 110 for array in cache.values())
    assert not any(array[:, :, len(ids) :].any() for array in cache.values())


def scales_of(lowered) -> list[ir.Value]:
    return [value for name, value in lowered.graph.initializers.items() if ".self_attn." in name and "scale" in name]


def doubled_in_the_graph(lowered) -> None:
    """Sixteen times the range leaves keys and values sixteen steps."""
    for value in scales_of(lowered):
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(16), name=value.name)


def clipped(lowered) -> None:
    for value in scales_of(lowered):
        value.const_value = ir.tensor(value.const_value.numpy() / np.float32(16), name=value.name)


@pytest.mark.parametrize("plant", [doubled_in_the_graph, clipped])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_error_exceeds_the_tolerance(quantized, exported, decoder, portable_logits, ids, kind, plant):
    lowered = quantized(BIASES, kind)
    assert len(scales_of(lowered)) == 4
    plant(lowered)
    found, _ = in_pieces(decoder(lowered.write(), lowered.geometry), ids, [len(ids)])
    assert relative_difference(found, portable_logits(exported(BIASES))) > CACHE_TOLERANCE
