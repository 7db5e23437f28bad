"""Calibration decides layer by layer, the bundle holds what it decided, and an interruption changes nothing."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.lowerings import varied

from llmc.bundle import read_export
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.calibrate.layers import STATE, calibrate, choose_stored_config
from llmc.optimize.calibrate.request import list_pruned
from llmc.optimize.lower.context import Float32, QuantConfig, QuantConfigs, WeightOnly, quant_configs
from llmc.optimize.progress import silent
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.quantize.pruning import Pruning
from llmc.optimize.recipe import PRUNINGS, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.store import Calibrated, Store, layer_part

# Largest difference of logits over the largest logit. A folded scale and its inverse are rounded once each, sums run in
# another order: about 1e-5. A factor that is left out, or applied on one side only, costs more than 1e-2.
FLOAT_TOLERANCE = 2e-4

BIASES, GROUPS, TIED = "llama-biases", "mistral-one-kv-head-bf16", "qwen3-tied-sharded"
NO_GROUPS = "llama-linear-rope-no-groups-fp16"
SAMPLES, LENGTH = 5, 16
FOUR, FOUR_ASYMMETRIC = WeightOnly(Grid(4, 32)), WeightOnly(Grid(4, 32, symmetric=False))


def samples() -> np.ndarray:
    """Windows of random tokens."""
    return np.random.default_rng(2).integers(0, 96, (SAMPLES, LENGTH))


def recipe_of(**request: Any) -> Any:
    return resolve(Request(precision="int4", **request), capabilities("cpu"), 128, "x")[0]


def run(case: Any, folder: Path, body: QuantConfig = FOUR, source: Any = None, **request: Any) -> Store:
    """Calibrate a case with a float head."""
    source = source or StreamedDecoder(case.export)
    return calibrate(source, samples(), recipe_of(**request), QuantConfigs(body, Float32()), folder, silent)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())


def lowered_logits(lowering, decoder, case, form: QuantConfig, store: Store | Calibrated | None) -> np.ndarray:
    """Logits [n, length, vocab] of the lowered graph with exact arithmetic, for the samples."""
    calibrated = store if isinstance(store, Calibrated) else Calibrated(store)
    lowered = lowering(case.export, form, Float32(), calibrated=calibrated)
    lowered.apply("remove dead nodes")
    lowered.exact()
    graph = decoder(lowered.write(), lowered.geometry)
    return np.stack([graph(ids) for ids in samples().tolist()])


@varied
def test_folding_alone_changes_no_logit(case, lowering, decoder, tmp_path):
    store = run(case, tmp_path / "store", smoothing=0.5)
    geometry = read_export(case.export).geometry
    for linear in geometry.linears:
        if linear.layer is not None and linear.producer:
            factors = store.read(layer_part(linear.layer))[f"columns:{linear.name}.weight"]
            assert factors.max() > 1.01 * factors.min()
    wanted = lowered_logits(lowering, decoder, case, Float32(), None)
    assert distance(lowered_logits(lowering, decoder, case, Float32(), store), wanted) <= FLOAT_TOLERANCE


@pytest.mark.parametrize(
    "forgotten",
    [
        "rows:model.layers.0.mlp.up_proj.weight",
        "rows:model.layers.0.mlp.up_proj.bias",
        "rows:model.layers.1.self_attn.v_proj.bias",
        "rows:model.layers.1.input_layernorm.weight",
        "columns:model.layers.0.self_attn.o_proj.weight",
        "columns:model.layers.1.self_attn.k_proj.weight",
    ],
)
def test_a_forgotten_factor_exceeds_the_tolerance(exported, lowering, decoder, tmp_path, forgotten):
    case = exported(BIASES)
    store = run(case, tmp_path / "store", smoothing=0.5)
    part = "layer-" + forgotten.split(".")[2].zfill(3)
    store.write(part, {key: array for key, array in store.read(part).items() if key != forgotten})
    found = lowered_logits(lowering, decoder, case, Float32(), Store(store.folder))
    assert distance(found, lowered_logits(lowering, decoder, case, Float32(), None)) > FLOAT_TOLERANCE


SCHEMES = {
    "gptq": ({"scheme": "gptq"}, FOUR),
    "smoothing + gptq": ({"scheme": "gptq", "smoothing": 0.5}, FOUR_ASYMMETRIC),
    "smoothing + rtn": ({"scheme": "rtn", "smoothing": 0.5}, FOUR),
    "pruning + gptq": ({"scheme": "gptq", "sparsity": "2:4", "pruning": "wanda"}, FOUR_ASYMMETRIC),
    "pruning + smoothing + rtn": ({"scheme": "rtn", "smoothing": 0.5, "sparsity": 0.5, "pruning": "wanda"}, FOUR),
    "pruning by magnitude": ({"scheme": "rtn", "sparsity": 0.5, "pruning": "magnitude"}, Float32()),
}


def calibrated_of(case: Any, store: Store | None, request: dict[str, Any]) -> Calibrated:
    pattern = recipe_of(**request).sparsity
    return Calibrated(store, Pruning(pattern, list_pruned(read_export(case.export).geometry) if pattern else ()))


def logits_of_calibration(case: Any, store: Store) -> np.ndarray:
    """What calibration's own layers, as it left them, say about the samples."""
    source = StreamedDecoder(case.export)
    with torch.inference_mode():
        hidden = source.norm()(torch.from_numpy(store.read(STATE)["hidden"]))
        return (hidden @ source.rows(source.head).T).numpy()


@pytest.mark.parametrize(
    ("name", "scheme"), [(BIASES, scheme) for scheme in SCHEMES] + [(NO_GROUPS, "gptq"), (TIED, "smoothing + gptq")]
)
def test_the_lowered_graph_computes_what_calibration_computed(exported, lowering, decoder, tmp_path, name, scheme):
    case, (request, form) = exported(name), SCHEMES[scheme]
    store = run(case, tmp_path / "store", form, **request)
    found = lowered_logits(lowering, decoder, case, form, calibrated_of(case, store, request))
    assert distance(found, logits_of_calibration(case, store)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("rule", PRUNINGS)
def test_pruned_weights_are_those_that_torch_prunes(exported, tmp_path, rule):
    """Wanda's rule from the paper: |W| times the norm of the inputs, each row alone; quantized zeros stay zero."""
    case, name = exported(BIASES), "model.layers.0.self_attn.q_proj"
    request = {"scheme": "gptq", "sparsity": "2:4", "pruning": rule}
    store = run(case, tmp_path / "store", **request)
    source = StreamedDecoder(case.export)
    with torch.inference_mode():
        layer = source.layer(0)
        inputs = layer.get_submodule("input_layernorm")(source.embed(torch.from_numpy(samples()))).flatten(0, 1)
        weight = layer.get_parameter("self_attn.q_proj.weight")
        score = weight.abs() * (inputs.norm(dim=0) if rule == "wanda" else 1)
        dropped = score.reshape(len(weight), -1, 4).argsort(dim=-1)[..., :2]
        zero = torch.zeros_like(score.reshape(len(weight), -1, 4), dtype=torch.bool).scatter_(-1, dropped, True)
    found = calibrated_of(case, store, request).chosen(f"{name}.weight", FOUR.grid).dequantize()
    assert (found[zero.reshape(weight.shape).numpy()] == 0).all()
    assert (found == 0).mean() < 0.65  # weights that stay may round to zero, too


def test_a_weight_that_is_pruned_in_one_place_only_exceeds_the_tolerance(exported, lowering, decoder, tmp_path):
    case, (request, form) = exported(BIASES), SCHEMES["pruning by magnitude"]
    store = run(case, tmp_path / "store", form, **request)
    assert distance(lowered_logits(lowering, decoder, case, form, store), logits_of_calibration(case, store)) > 0.01


@pytest.mark.parametrize("what", ["values:int4x32:", "scales:int4x32:", "columns:"])
def test_a_weight_that_the_bundle_does_not_take_over_exceeds_the_tolerance(exported, lowering, decoder, tmp_path, what):
    case = exported(BIASES)
    store = run(case, tmp_path / "store", scheme="gptq", smoothing=0.5)
    key = f"{what}model.layers.1.mlp.down_proj.weight"
    arrays = dict(store.read("layer-001"))
    arrays[key] = np.roll(arrays[key], 1, axis=0)
    if what == "columns:":  # stored integers go before factors, so take them away
        arrays = {name: array for name, array in arrays.items() if ":int4x32:model.layers.1.mlp.down" not in name}
    wanted = logits_of_calibration(case, store)
    store.write("layer-001", arrays)
    found = lowered_logits(lowering, decoder, case, FOUR, Store(store.folder))
    assert distance(found, wanted) > FLOAT_TOLERANCE


def test_each_layer_sees_the_quantized_ones_before_it(exported, tmp_path):
    """With one linear of the first layer in float, ranges of the second change."""
    case = exported(BIASES)
    recipe = recipe_of(scheme="gptq")
    ranges = []
    for number, layers in enumerate([(), (("model.layers.0.mlp.down_proj", Float32()),)]):
        forms = QuantConfigs(FOUR, Float32(), layers)
        store = calibrate(StreamedDecoder(case.export), samples(), recipe, forms, tmp_path / str(number), silent)
        ranges.append(store.read("layer-001")["input:model.layers.1.self_attn.q_proj"])
        assert ("values:int4x32:model.layers.0.mlp.down_proj.weight" in store.read("layer-000")) == (not layers)
    assert (ranges[0] != ranges[1]).any()


HEAVY = {"scheme": "gptq", "smoothing": 0.5}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(exported, tmp_path_factory) -> dict[str, bytes]:
    """The files of a calibration that ran in one go."""
    return contents(run(exported(BIASES), tmp_path_factory.mktemp("whole") / "store", **HEAVY).folder)


@pytest.mark.parametrize(("writes", "error"), [(0, KeyboardInterrupt), (1, OSError), (4, KeyboardInterrupt)])
def test_an_interrupted_calibration_goes_on_and_ends_the_same(exported, whole, tmp_path, monkeypatch, writes, error):
    write, done = Store.write, []

    def interrupted(store: Store, part: str, arrays: Any) -> None:
        if len(done) == writes:
            raise error
        done.append(part)
        write(store, part, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", interrupted)
        with pytest.raises(error):
            run(exported(BIASES), tmp_path / "store", **HEAVY)
    assert len(done) == writes
    source = Watched(exported(BIASES).export)
    assert contents(run(exported(BIASES), tmp_path / "store", source=source, **HEAVY).folder) == whole
    assert source.read == list(range(writes // 2, 2))


class Watched(StreamedDecoder):
    """Notes which layers were read, and how many of those read before were alive then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[int] = []
        self.alive: list[int] = []
        self._weights: list[weakref.ref] = []

    def layer(self, index: int) -> Any:
        self.alive.append(len({id(weight()) for weight in self._weights if weight() is not None}))
        self.read.append(index)
        layer = super().layer(index)
        self._weights.append(weakref.ref(layer))
        return layer


def test_at_most_two_layers_are_in_memory(exported, tmp_path):
    """The last one goes when the next one has been read."""
    source = Watched(exported(BIASES).export)
    source.config = replace(source.config, layers=source.config.layers * 2)
    source.geometry = source.config.geometry
    for name, stored in list(source._stored.items()):
        if name.startswith("model.layers."):
            words = name.split(".")
            source._stored[".".join([*words[:2], str(int(words[2]) + 2), *words[3:]])] = stored
    run(exported(BIASES), tmp_path / "store", source=source, **HEAVY)
    assert source.read == [0, 1, 2, 3]
    assert source.alive == [0, 1, 1, 1]


@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (576, 64), (160, 32)])
def test_integers_for_engines_are_chosen_on_the_block_that_fits(manifest, inputs, block):
    recipe = replace(manifest.recipe, precision="int4", head="int4", phases="single", activations="none")
    form = choose_stored_config(
        recipe, quant_configs(recipe, manifest.geometry)["single"], "model.layers.0.mlp.down_proj", inputs
    )
    assert form == WeightOnly(Grid(4, block, positive=True))
    shared = replace(recipe, phases="shared")
    kept = choose_stored_config(
        shared, quant_configs(shared, manifest.geometry)["shared"], "model.layers.0.mlp.down_proj", inputs
    )
    assert kept == WeightOnly(Grid(4, 128)), "ONNX Runtime pads the last block"
