"""Families that do not exist go the whole way: layers differ in heads, widths, windows, ropes, linears, and mixers."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from doubles import invented
from doubles.lowerings import Lowering, difference, open_session, portable
from doubles.speculators import Always

from llmc.bundle import DECODER_FILE, Geometry, Limits, read_export
from llmc.bundle.model.linear import Linear
from llmc.errors import BuildError
from llmc.export import export
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.layers import calibrate
from llmc.optimize.judge.reference import Reference, empty_caches
from llmc.optimize.lower.context import Computed, Float32, LoweringContext, QuantConfig, QuantConfigs, WeightOnly
from llmc.optimize.lower.onnxruntime import cpu_linears
from llmc.optimize.lower.rotary import rotary_tables
from llmc.optimize.passes import PASSES, lower
from llmc.optimize.plan.device import device_plan
from llmc.optimize.plan.memory import memory_plan, plan_build
from llmc.optimize.plan.sizes import weight_bytes
from llmc.optimize.progress import silent
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.store import Calibrated
from llmc.runtime import Request as Asked
from llmc.runtime import SamplingParams, load

CAPACITY, TOKENS = 24, 20
IDS = np.random.default_rng(1).integers(1, invented.VOCAB, TOKENS)
LIMITS = Limits(CAPACITY, 2, CAPACITY)
# Largest absolute difference of logits in float32, as for the other families: sums run in another order. Planted errors
# cost a hundred times as much.
FLOAT_TOLERANCE = 1e-4
EIGHT, FOUR = WeightOnly(Grid(8, 32)), WeightOnly(Grid(4, 32))
LOWERINGS: dict[str, tuple[str, QuantConfig, dict[str, int]]] = {
    "cpu": ("cpu", Float32(), {"": 21, "com.microsoft": 1}),
    "cpu int8": ("cpu", EIGHT, {"": 21, "com.microsoft": 1}),
    "cpu int4": ("cpu", FOUR, {"": 21, "com.microsoft": 1}),
    "cuda": ("cuda", Computed(), {"": 21, "com.microsoft": 1}),
    "cuda int4": ("cuda", FOUR, {"": 21, "com.microsoft": 1}),
    "tensorrt": ("tensorrt", Computed(), {"": 24}),
    "tensorrt int8": ("tensorrt", WeightOnly(Grid(8, positive=True)), {"": 24}),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of its checkpoint and its export; the family is known meanwhile."""
    folder = tmp_path_factory.mktemp("invented")
    with pytest.MonkeyPatch.context() as patch:
        invented.register(patch)
        invented.write_checkpoint(folder / "checkpoint")
        export(folder / "checkpoint", folder / "export")
        yield folder


@pytest.fixture(scope="module")
def geometry(family: Path) -> Geometry:
    return read_export(family / "export").geometry


@pytest.fixture(scope="module")
def expected(family: Path) -> np.ndarray:
    return invented.Reference(family / "checkpoint")(IDS[None])[0]


@pytest.fixture
def lowering(family: Path, geometry: Geometry, tmp_path: Path) -> Iterator[Callable[..., Lowering]]:
    """The family on its way through the passes of a target."""
    made: list[Lowering] = []

    def start(name: str, calibrated: Calibrated | None = None, listed: Geometry = geometry) -> Lowering:
        target, body, opsets = LOWERINGS[name]
        (folder := tmp_path / f"lowering-{len(made)}").mkdir()
        found = Lowering(family / "export", folder, PASSES[target], opsets, 10 if opsets[""] < 24 else 12)
        configs, weights = QuantConfigs(body, body), found.weights
        found.context = LoweringContext("x", listed, LIMITS, configs, weights, calibrated or Calibrated())
        made.append(found)
        return found

    yield start
    for each in made:
        each.weights.close()


def lowered(lowering: Lowering, name: str) -> Path:
    """The folder of the lowered graph, in which products of blocks are exact."""
    lower(lowering.model, LOWERINGS[name][0], lowering.context)
    lowering.exact()
    return lowering.write()


def logits(folder: Path, geometry: Geometry, pieces: tuple[int, ...] = (7, 1, 12)) -> np.ndarray:
    """Logits [S, V] after each of the tokens, fed in ``pieces``."""
    # An optimized session would multiply TensorRT's dequantized weights with other kernels than those written down.
    session = open_session(folder / DECODER_FILE, optimized=False)
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    held = empty_caches(geometry.caches, 1, CAPACITY, "float32")
    found, start = [], 0
    for size in pieces:
        feeds = {
            "input_ids": IDS[None, start : start + size],
            "past_lengths": np.array([start]),
            "logit_indices": np.arange(size)[None],
            "cache_slots": np.arange(CAPACITY),
            "new_lengths": np.array([size]),
        }
        results = dict(
            zip(outputs, session.run(None, {n: v for n, v in (feeds | held).items() if n in inputs}), strict=True)
        )
        found.append(results["logits"][0])
        held = {
            past: results[present]
            for cache in geometry.caches
            for past, present in zip(cache.inputs, cache.outputs, strict=True)
        }
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize("name", [name for name, (_, body, _) in LOWERINGS.items() if not hasattr(body, "grid")])
def test_every_lowering_computes_what_the_family_computes(lowering, geometry, expected, name):
    got = logits(lowered(lowering(name), name), geometry)
    assert difference(got, expected) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("name", [name for name, (_, body, _) in LOWERINGS.items() if hasattr(body, "grid")])
def test_quantized_lowerings_compute_what_their_weights_stand_for(lowering, tmp_path, geometry, name):
    wanted = logits(portable(started := lowering(name), tmp_path / "portable"), geometry)
    got = logits(lowered(started, name), geometry)
    assert difference(got, wanted) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("name", ["cpu int8", "cpu int4"])
def test_a_large_head_in_parts_computes_the_same_bits(lowering, geometry, monkeypatch, name):
    whole = logits(lowered(lowering(name), name), geometry)
    monkeypatch.setattr(cpu_linears, "LARGE_BITS", 0)
    parts = lowering(name)
    assert np.array_equal(logits(lowered(parts, name), geometry), whole)
    assert len([node for node in parts.nodes("MatMulNBits") if node.name.startswith("lm_head")]) == 4


def test_the_reference_layer_by_layer_computes_it_too(family, expected):
    reference = Reference(family / "export")
    [got] = map(reference.project, reference.compute_normed([IDS.tolist()]))
    assert difference(got, expected) <= FLOAT_TOLERANCE


# ---------------------------------------------------------------------------------------------------------- planted


@pytest.mark.parametrize("name", ["cpu", "cuda", "tensorrt"])
def test_swapped_tables_exceed_the_tolerance(lowering, geometry, expected, name):
    folder = lowered(lowering(name), name)
    model = ir.load(folder / DECODER_FILE)
    first, second = (
        [model.graph.initializers[f"rotary_emb.{rope}.{part}"] for part in ("cos", "sin")] for rope in (0, 1)
    )
    for one, other in zip(first, second, strict=True):
        one.const_value, other.const_value = other.const_value, one.const_value
    ir.save(model, folder / DECODER_FILE)
    assert difference(logits(folder, geometry), expected) > 100 * FLOAT_TOLERANCE


@pytest.mark.parametrize("name", ["cpu", "cuda", "tensorrt"])
@pytest.mark.parametrize("part", ["linears", "norms", "attentions", "mlps"])
def test_a_part_that_the_manifest_does_not_list_is_noticed(lowering, geometry, part, name):
    if part == "mlps" and name.startswith("tensorrt"):
        pytest.skip("TensorRT fuses activations itself")
    started = lowering(name, listed=replace(geometry, **{part: getattr(geometry, part)[1:]}))
    with pytest.raises(BuildError, match="export the checkpoint again"):
        lower(started.model, LOWERINGS[name][0], started.context)


def test_two_ropes_under_one_name_are_refused(lowering):
    started = lowering("cpu")
    one, other = (started.graph.initializers[f"rotary_emb.{rope}.inv_freq"] for rope in (0, 1))
    one.const_value, taken = ir.tensor(other.const_value.numpy(), name=one.name), one.const_value
    rotary_tables(next(use.node for use in one.uses()), started.context)
    one.const_value = taken
    with pytest.raises(AssertionError, match=r"rotary_emb\.0\.cos is computed from two sources"):
        rotary_tables(next(use.node for use in one.uses()), started.context)


# ----------------------------------------------------------------------------------------------------- plan, calibrate


def test_plans_count_every_linear_and_every_cache(geometry):
    recipe, limits = resolve(Request(precision="fp32"), capabilities("cpu"), geometry.max_positions, "x")
    weights = sum(linear.size for linear in geometry.linears)
    assert set(weight_bytes(geometry, recipe).values()) == {4 * weights}
    per_token = (
        2 * 4 * sum(layer["attention"]["kv_heads"] * layer["attention"]["head_dim"] for layer in invented.LAYERS)
    )
    plan = memory_plan(geometry, limits, recipe, 0)
    assert sum(part.per_position for part in plan.uses if part.name == "cache") == per_token
    assert device_plan(geometry, limits, replace(recipe, compute="float32"))["cache"].per_position == per_token
    assert plan_build(geometry, replace(recipe, scheme="gptq"), limits, 0, 4, 16).total > 4 * weights


def folds(linear: Linear, options: dict[str, Any]) -> bool:
    """Whether factors go into its columns: none pass through an activation."""
    if linear.layer is None or "smoothing" not in options:
        return False
    return not linear.name.endswith("down_proj") or bool(invented.LAYERS[linear.layer]["mlp"].get("gated", True))


@pytest.mark.parametrize("options", [{"scheme": "gptq"}, {"smoothing": 0.5}], ids=str)
def test_calibration_decides_every_linear(family, lowering, tmp_path, geometry, expected, options: dict[str, Any]):
    recipe, _ = resolve(Request(precision="int4", phases="shared"), capabilities("cpu"), geometry.max_positions, "x")
    configs = QuantConfigs(Float32(), Float32()) if "smoothing" in options else QuantConfigs(FOUR, FOUR)
    ids = np.random.default_rng(2).integers(1, invented.VOCAB, (4, 16))
    source = StreamedDecoder(family / "export")
    store = calibrate(source, ids, replace(recipe, **options), configs, tmp_path / "store", silent)
    for linear in geometry.linears:
        part = store.read("head" if linear.layer is None else f"layer-{linear.layer:03d}")
        assert f"input:{linear.name}" in part
        assert (f"columns:{linear.name}.weight" in part) == folds(linear, options)
    name = "cpu" if "smoothing" in options else "cpu int4"
    got = logits(lowered(lowering(name, Calibrated(store)), name), geometry)
    if "smoothing" in options:  # folded factors cancel out
        assert difference(got, expected) <= FLOAT_TOLERANCE
    else:
        assert np.isfinite(got).all()


# ------------------------------------------------------------------------------------------------------------- bundles


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "int8"},
        {"precision": "int4", "scheme": "gptq", "cache": "int8"},
        {"precision": "int4", "scheme": "gptq", "phases": "shared"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_bundles_are_built_and_run(family, tmp_path, options: dict[str, Any]):
    text = tmp_path / "text.txt"
    text.write_text("A lamp in the window, a boat on the river, and somebody who counts them both.\n" * 40)
    calibration = {"decoder": StreamedDecoder, "calibration": text, "samples": 4, "length": 32}
    needs = options.keys() & {"scheme", "cache", "smoothing"}
    request = Request(max_context=64, max_batch=2, **options)
    report = build(
        BuildRequest(family / "export", tmp_path / "bundle", recipe=request, **(calibration if needs else {}))
    )
    prompt, reference = IDS.tolist(), invented.Reference(family / "checkpoint")
    with load(report.output) as model:
        answer = list(model.generate(prompt, max_tokens=6, temperature=0.0, ignore_eos=True).token_ids)
        assert len(answer) == 6
        if options == {"precision": "fp32"}:
            for count in range(6):
                assert answer[count] == reference(np.array([prompt + answer[:count]]))[0, -1].argmax()


# -------------------------------------------------------------------------------------------------------------- hybrid


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the hybrid's checkpoint and its export; the family is known meanwhile."""
    folder = tmp_path_factory.mktemp("hybrid")
    with pytest.MonkeyPatch.context() as patch:
        invented.register(patch)
        invented.write_checkpoint(folder / "checkpoint", layers=invented.HYBRID)
        export(folder / "checkpoint", folder / "export")
        yield folder


@pytest.mark.parametrize("missing", [None, "recurrents", "mixtures", "attentions"])
def test_a_hybrid_is_lowered_if_all_its_parts_are_listed(hybrid, tmp_path, missing):
    expected = invented.Reference(hybrid / "checkpoint")(IDS[None])[0]
    geometry = read_export(hybrid / "export").geometry
    listed = replace(geometry, **{missing: getattr(geometry, missing)[1:]}) if missing else geometry
    started = Lowering(hybrid / "export", tmp_path, PASSES["cpu"], {"": 21, "com.microsoft": 1}, 10)
    configs = QuantConfigs(Float32(), Float32())
    with closing(started.weights):
        started.context = LoweringContext("x", listed, LIMITS, configs, started.weights, Calibrated())
        if missing:
            with pytest.raises(BuildError, match="export the checkpoint again"):
                lower(started.model, "cpu", started.context)
            return
        got = logits(lowered(started, "cpu"), geometry)
    assert difference(got, expected) <= FLOAT_TOLERANCE


def test_a_hybrid_runs_with_prefixes_drafts_and_neighbours(hybrid, tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    size = {"max_context": 256, "max_batch": 3}
    build(BuildRequest(hybrid / "export", tmp_path / "draft", recipe=Request(precision="int8", **size)))
    build(BuildRequest(hybrid / "export", tmp_path / "bundle", recipe=Request(precision="fp32", **size)))
    reference, greedy = invented.Reference(hybrid / "checkpoint"), {"max_tokens": 40, "ignore_eos": True}
    prompt = np.random.default_rng(3).integers(1, invented.VOCAB, 80).tolist()

    def continues(text: list[int], tokens: tuple[int, ...]) -> bool:
        return list(tokens) == reference(np.array([[*text, *tokens]]))[0, len(text) - 1 : -1].argmax(-1).tolist()

    with load(tmp_path / "bundle", determinism="fast", draft=tmp_path / "draft") as model:
        first = model.generate(prompt, temperature=0.0, **greedy)
        texts = [[*prompt, *first.token_ids, *prompt[:9]], prompt[:51], prompt[7:60]]
        handles = [model.submit(Asked(text, SamplingParams(temperature=0.0, **greedy))) for text in texts]
        found = [first, *(handle.result() for handle in handles)]
        assert all(continues(text, one.token_ids) for text, one in zip([prompt, *texts], found, strict=True))
        assert found[1].usage.cached_tokens > 0
        metrics = model.engine.metrics.snapshot()
        assert 0 < metrics.draft_accepted < metrics.draft_proposed


def test_a_hybrid_is_calibrated(hybrid, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A lamp in the window, a boat on the river, and somebody who counts them both.\n" * 40)
    request = Request(precision="int4", max_context=64, max_batch=2)
    calibration = {"decoder": StreamedDecoder, "calibration": text, "samples": 4, "length": 32}
    report = build(BuildRequest(hybrid / "export", tmp_path / "bundle", recipe=request, **calibration))
    with load(report.output) as model:
        assert len(model.generate(IDS.tolist(), max_tokens=6, ignore_eos=True).token_ids) == 6
