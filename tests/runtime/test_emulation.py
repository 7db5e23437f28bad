"""Bundles for GPUs on the CPU: ONNX Runtime runs the very graph that the engine was made of, and it computes the model.

So a bundle can be checked where its GPU is not, through the same generation loop.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from doubles.lowerings import open_session

from llmc.bundle import DECODER_FILE, read_bundle, read_export
from llmc.errors import GpuError
from llmc.runtime import Model, load
from llmc.runtime.sampling.truncation import ACCURACY
from llmc.runtime.sessions import EMULATED_BYTES, Batch, Phase, emulate_target
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession

# Largest difference of logits in float32: the same sums in another order. Found: 2e-5. A length that is off by one is
# noticed, see below.
TOLERANCE = 2e-4
KINDS = ("tensorrt", "cuda")
CONTEXT, ROWS, CHUNK = 600, 4, 64
IDS = np.random.default_rng(3).integers(3, 4096, 300).tolist()
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "import os\n\n\ndef main(path):\n    for name in",
    "Once upon a time there was a small",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog, and when",
)
NEW_TOKENS = 12
Logits = np.ndarray


@pytest.fixture(scope="module")
def bundles(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles of the small model in float32: for TensorRT, without an engine, and for CUDA."""
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest, Request
    from llmc.optimize.recipe.engine import EngineRequest

    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            engine = None if kind == "cuda" else EngineRequest(deferred=True)
            recipe = Request(precision="fp32", prefill_chunk=CHUNK, max_context=CONTEXT, max_batch=ROWS)
            output = tmp_path_factory.mktemp(kind) / "bundle"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("llmc.runtime.sessions.onnxruntime.cuda.open_driver", no_driver)
                made[kind] = build(BuildRequest(tiny_export, output, target=kind, recipe=recipe, engine=engine)).output
        return made[kind]

    return get


def no_driver(*_: object, **__: object) -> None:
    raise GpuError("no NVIDIA driver was found; install it")


@pytest.fixture(params=KINDS)
def bundle(request: pytest.FixtureRequest, bundles: Callable[[str], Path]) -> Path:
    """Each of them."""
    return bundles(request.param)


@pytest.fixture(scope="module")
def portable(tiny_export: Path) -> Logits:
    """Logits [S, V] after every one of IDS, by the exported graph itself."""
    g = read_export(tiny_export).geometry
    session = open_graph(tiny_export)
    shape = (1, g.attentions[0].kv_heads, len(IDS), g.attentions[0].head_dim)
    caches = [f"past_key_values.{layer}.{part}" for layer in range(g.layers) for part in ("key", "value")]
    feeds = {
        "input_ids": np.array([IDS], np.int64),
        "past_lengths": np.zeros(1, np.int64),
        "logit_indices": np.arange(len(IDS))[None],
        **{name: np.zeros(shape, np.float32) for name in caches},
    }
    logits: Logits = session.run(["logits"], feeds)[0][0]
    return logits


@pytest.fixture
def session(bundle: Path) -> Iterator[OnnxRuntimeSession]:
    opened = OnnxRuntimeSession(bundle, emulate_target(read_bundle(bundle)), 1)
    yield opened
    opened.close()


def feed(session: OnnxRuntimeSession, ids: Sequence[int], sizes: Sequence[int], row: int = 0, off: int = 0) -> Logits:
    """Logits [S, V] of ``ids`` in calls of ``sizes`` tokens, each of them a prefill but those of one; ``off`` is added
    to the lengths that later calls are told."""
    parts, start = [], 0
    for size in sizes:
        phase = Phase.DECODE if size == 1 else Phase.PREFILL
        new = np.array([ids[start : start + size]], np.int64)
        past = np.array([start + off if start else 0], np.int64)
        parts.append(session.run(Batch.of(phase, new, past, np.arange(size)[None], row))[0].copy())
        start += size
    return np.concatenate(parts)


@pytest.mark.parametrize("sizes", [(64,), (5, 1, 1, 40, 1)], ids=str)
def test_prefill_chunks_and_decode_give_the_exported_graphs_logits(session, portable, sizes):
    session.cache.reserve(1, 64)
    found = feed(session, IDS, sizes)
    assert np.abs(found - portable[: sum(sizes)]).max() <= TOLERANCE


def test_the_most_probable_tokens_and_the_sum_of_exponentials_are_those_of_the_logits(bundle):
    graph, rows = open_graph(bundle), 2
    names = ["logits", "top_logits", "top_ids", "sum_exp"]
    sizes = {"batch": rows, "sequence": 8, "outputs": 8, "capacity": 640, "attended": 256}
    generator = np.random.default_rng(1)
    feeds: dict[str, np.ndarray] = {}
    for value in graph.get_inputs():
        kind = np.float32 if value.type == "tensor(float)" else np.int64
        feeds[value.name] = np.zeros([sizes.get(dim, dim) for dim in value.shape], kind)
    feeds["input_ids"] = generator.integers(3, 4096, (rows, 8))
    feeds["logit_indices"] = np.tile(np.arange(8), (rows, 1))
    if "cache_slots" in feeds:
        feeds["cache_slots"] = np.arange(256)
    logits, values, ids, sums = graph.run(names, feeds)
    assert ids.dtype == np.int64 and values.dtype == sums.dtype == logits.dtype == np.float32
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :256]  # of equal ones the lowest id, as ONNX says
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(logits, order, -1))
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    assert np.abs(sums / exact - 1).max() <= ACCURACY
    assert np.abs((sums - 1) / exact - 1).max() > ACCURACY  # the largest of them left out


def open_graph(bundle: Path) -> ort.InferenceSession:
    return open_session(bundle / DECODER_FILE)


def test_the_tolerance_notices_a_position_too_few(session, portable):
    session.cache.reserve(1, 64)
    found = feed(session, IDS, (32, 16), off=-1)
    assert np.abs(found - portable[:48]).max() > TOLERANCE


@pytest.fixture(scope="module")
def wanted(fp32_bundle: Path) -> list[tuple[int, ...]]:
    """Greedy tokens of the CPU's own bundle in float32."""
    with load(fp32_bundle, self_test=False) as model:
        return [model.generate(prompt, max_tokens=NEW_TOKENS, temperature=0).token_ids for prompt in PROMPTS]


def generate(model: Model) -> list[tuple[int, ...]]:
    """Greedy tokens of all prompts at once."""
    handles = [model.stream(prompt, max_tokens=NEW_TOKENS, temperature=0) for prompt in PROMPTS]
    return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize(
    "options", [{"prefix_cache_bytes": 0}, {"prefix_cache_bytes": 8_000_000}, {"draft": "lookup"}], ids=str
)
def test_requests_that_share_batches_get_the_tokens_of_the_cpus_bundle(bundle, wanted, options):
    with load(bundle, emulate=True, self_test=False, **options) as model:
        assert generate(model) == wanted
        assert generate(model) == wanted, "also from what the first round left behind"


def test_a_bundle_that_is_emulated_is_planned_in_the_machines_memory(bundle):
    manifest = read_bundle(bundle)
    found = emulate_target(manifest)
    assert manifest.device is not None
    assert (found.target.name, found.target.engine) == (manifest.target.name, "onnxruntime")
    assert found.device is None
    assert found.memory["weights"].fixed == EMULATED_BYTES * manifest.source.parameters
    assert found.memory["cache"] == manifest.device["cache"]
    assert found.memory.total(CONTEXT) > manifest.memory.total(CONTEXT) + EMULATED_BYTES * manifest.source.parameters
    assert (found.files, found.golden, found.limits) == (manifest.files, manifest.golden, manifest.limits)
