"""Errors of layers on their own: none in float32, and a planted one is found in its layer and nowhere else."""

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import read_bundle
from llmc.optimize.build import build
from llmc.optimize.judge.layers import LayerError, layer_errors
from llmc.optimize.judge.quality import compare
from llmc.optimize.judge.reference import Reference
from llmc.optimize.recipe import BuildRequest, Request
from llmc.runtime import load
from llmc.runtime.sessions import Phase

TOKENS = 12
# Decibels. float32 rounds at 2^-24 (144 dB), and a layer adds up some hundred products: measured 125 ... 130.
EXACT = 100
# A scale that is wrong by a third is an error of about 10 dB in what it scales; int8 weights are at 33 ... 40.
PLANTED = 1.3


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 96, (2, TOKENS))


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory: pytest.TempPathFactory):
    """Bundles of random checkpoints, each built once; rounded ones have a graph for each phase."""
    folder, built = tmp_path_factory.mktemp("layers"), {}

    def get(name: str, precision: str) -> Path:
        if (name, precision) not in built:
            request = Request(precision=precision, phases=None if precision == "fp32" else "split")
            built[name, precision] = build(
                BuildRequest(exported(name).export, folder / f"{name}-{precision}", recipe=request)
            ).output
        return built[name, precision]

    return get


def errors_of(folder: Path, export: Path, tokens: np.ndarray) -> dict[tuple[str, str], LayerError]:
    found = layer_errors(folder, read_bundle(folder), Reference(export), tokens)
    return {(error.name, error.phase): error for error in found}


# Biases; a tied head and norms of queries and keys; a sliding window.
NAMES = ["llama-biases", "qwen3-tied-sharded", "gpt2-scale-by-layer"]


def test_layers_of_mixed_precision_can_be_measured(exported, tokens, tmp_path):
    """The first layer in full precision: no other layer may hang on its integers."""
    export = exported(NAMES[1]).export
    exact = Request(precision="int8", layers={"model.layers.0.*": "fp32"}, cache="float32")
    built = build(BuildRequest(export, tmp_path / "mixed", recipe=exact))
    found = errors_of(built.output, export, tokens)
    assert found["model.layers.0", "prefill"].decibels > EXACT > found["model.layers.1", "prefill"].decibels


@pytest.mark.parametrize("name", NAMES)
def test_full_precision_has_no_error_anywhere(made, exported, tokens, name):
    found = errors_of(made(name, "fp32"), exported(name).export, tokens)
    layers = read_bundle(made(name, "fp32")).geometry.layers
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "lm_head"]
    assert found.keys() == {(part, phase) for part in names for phase in ("prefill", "decode")}
    assert min(error.decibels for error in found.values()) > EXACT


# Relative: both sides compute the same layer, one through the cut graph, and add up in another order.
SAME_KL = 1e-3


@pytest.mark.parametrize("phase", Phase)
def test_kl_by_layer_is_that_of_a_bundle_in_which_only_that_layer_is_rounded(exported, tokens, tmp_path, phase):
    export = exported(NAMES[1]).export
    request = Request(precision="int4", head="fp32", layers={"model.layers.0.*": "fp32"}, cache="float32")
    folder = build(BuildRequest(export, tmp_path / "one", recipe=request)).output
    reference = Reference(export)
    found = layer_errors(folder, read_bundle(folder), reference, tokens, kl=True)
    by_layer = {(error.name, error.phase): error.mean_kl for error in found}
    states = reference.compute_normed(tokens.tolist())
    with load(folder, threads=1, self_test=False) as model:
        pairs = [
            (reference.project(it), model.runner.logits(ids, phase))
            for it, ids in zip(states, tokens.tolist(), strict=True)
        ]
    whole = np.concatenate([compare(*pair)[0] for pair in pairs]).mean()
    assert by_layer["model.layers.1", phase.value] == pytest.approx(whole, rel=SAME_KL)
    assert max(by_layer["model.layers.0", phase.value], by_layer["lm_head", phase.value]) < whole / 1000


@pytest.fixture
def broken(made, tmp_path):
    """A bundle in which the scales of one linear of the decode graph are wrong."""
    folder = shutil.copytree(made("llama-biases", "int8"), tmp_path / "broken")
    graph = ir.load(folder / read_bundle(folder).graphs["decode"].file).graph
    name = "layers.1.self_attn.o_proj"
    [tensor] = [v.const_value for k, v in graph.initializers.items() if name in k and k.endswith(".scales")]
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(tensor.offset)
        file.write((tensor.numpy() * np.float32(PLANTED)).tobytes())
    return folder


def test_a_planted_error_shows_in_its_layer_and_path_and_nowhere_else(made, exported, tokens, broken):
    export = exported("llama-biases").export
    sound, found = (errors_of(folder, export, tokens) for folder in (made("llama-biases", "int8"), broken))
    place = ("model.layers.1", "decode")
    assert found[place].decibels < sound[place].decibels - 10
    assert min(found.values(), key=lambda error: error.decibels) == found[place]
    for other in found.keys() - {place}:
        assert found[other] == sound[other]
