"""An int8 KV cache: the graph and the session agree with a float cache, and the memory really is a quarter."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import relative_difference

from llmc.bundle import read_bundle, read_export
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.request import CalibrationRequest
from llmc.optimize.recipe import Request
from llmc.optimize.weights.store import Calibrated, Store
from llmc.runtime import load
from llmc.runtime.sessions import open_session
from llmc.runtime.sessions.base import Batch, Phase

pytest.importorskip("onnxruntime", "1.31", reason="older engines know no quantized cache")

# Root mean square of the difference over that of the logits: keys and values with 255 steps, through two layers of
# random weights whose attention is nearly a choice of one position, cost 1 to 4 %. A scale 16 times off costs more.
CACHE_TOLERANCE = 0.1
# The small model, trained: 0.5 % with a scale per tensor, 1.4 % per channel, where few samples leave ranges short.
TRAINED_TOLERANCE = 0.02

BIASES, UNTIED, TIED = "llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded"
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


# ------------------------------------------------------------------------------------------------------------ the graph


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [BIASES, UNTIED, TIED])
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


# ----------------------------------------------------------------------------------------------------------- the bundle


@pytest.fixture(scope="module")
def bundles(tiny_export, tiny_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The small model in float32, with a cache of each kind."""
    folder, made = tmp_path_factory.mktemp("caches"), {}
    text = tiny_checkpoint.parent / "validation.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.optimize.calibrate.layers.usable_threads", lambda: 1)
        for kind in ("float32", *KINDS):
            asked = CalibrationRequest(StreamedDecoder, text, samples=4, length=128) if kind != "float32" else None
            recipe = Request(precision="fp32", cache=kind, max_context=512, prefill_chunk=64)
            made[kind] = build(tiny_export, folder / kind, recipe=recipe, calibration=asked).output
    return made


def logits_of(folder: Path, ids: list[int], pieces: list[int]) -> tuple[np.ndarray, int]:
    """Logits of all positions through the session, and the bytes of its cache."""
    session = open_session(folder, read_bundle(folder), 1)
    session.cache.reserve(1, 256)
    outputs, position = [], 0
    for size in pieces:
        part = np.array([ids[position : position + size]], np.int64)
        phase = Phase.PREFILL if size > 1 else Phase.DECODE
        outputs.append(session.run(Batch(phase, part, np.array([position]), np.arange(size)[None]))[0].copy())
        position += size
    size = sum(array.nbytes for array in session.cache.arrays)
    session.close()
    return np.concatenate(outputs), size


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_and_decode_through_the_session_are_close(bundles, tiny_checkpoint, kind):
    with load(bundles["float32"], threads=1) as model:
        ids = model.tokenizer.encode((tiny_checkpoint.parent / "validation.txt").read_text()[-3000:])[:150]
    pieces = [64, 64, 10] + [1] * 12
    wanted, float_bytes = logits_of(bundles["float32"], ids, pieces)
    found, bytes_ = logits_of(bundles[kind], ids, pieces)
    assert 0 < relative_difference(found, wanted) <= TRAINED_TOLERANCE
    assert bytes_ * 4 == float_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_says_what_the_cache_is(bundles, kind):
    manifest, plain = read_bundle(bundles[kind]), read_bundle(bundles["float32"])
    assert (manifest.cache, plain.cache) == ("int8", "float32")
    assert manifest.recipe.cache == kind
    assert manifest.memory.cache_per_token * 4 == plain.memory.cache_per_token
    assert manifest.target.engine_minimum == "1.31"
    assert manifest.recipe.calibration is not None and plain.recipe.calibration is None
