"""A mixture of experts goes the whole way: built in each precision, judged, planned and run."""

import numpy as np
import pytest
import torch

from llmc.bundle import read_bundle, read_export
from llmc.errors import UsageError
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.layers import Read, calibrate
from llmc.optimize.lower.context import WeightOnly, quant_configs
from llmc.optimize.lower.onnxruntime.experts import fit_block
from llmc.optimize.plan.sizes import BLOCK_COPIES, EXPERT_COPIES, expert_bytes, linear_bytes
from llmc.optimize.progress import silent
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.store import Calibrated
from llmc.runtime import load

# Mean KL of random weights, whose routers are near ties more often than trained ones: 0.014 and 0.34 were seen.
MOST_KL = {"fp32": 1e-6, "int8": 0.05, "int4": 1.0}
# Of what experts rounded to nearest lose, on inputs of few directions: 0.30 was seen, of inputs that are noise 1.
MOST_LOSS = 0.5
PROMPTS = [np.random.default_rng(seed).integers(2, 96, 5 * seed).tolist() for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def mixture(exported):
    return exported("olmoe-unnormalized").export


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, it) for name in ("olmoe-unnormalized", "gemma4-experts-beside-mlp") for it in MOST_KL),
        ("deepseek_v3-latent-queries-corrected-groups", "int8"),
    ],
)
def test_a_mixture_is_built_and_runs_alone_as_together(exported, tmp_path, name, precision):
    manifest = build(BuildRequest(exported(name).export, tmp_path / "b", precision=precision, max_context=64)).manifest
    assert manifest.recipe.phases == "shared" and not manifest.recipe.rotated
    assert max(phase.mean_kl for phase in manifest.quality.phases.values()) <= MOST_KL[precision]
    with load(tmp_path / "b", prefill_chunk=8) as model:
        requests = [model.request(prompt, max_tokens=8, temperature=0) for prompt in PROMPTS]
        alone = [model.submit(request).result().token_ids for request in requests]
        together = [handle.result().token_ids for handle in [model.submit(request) for request in requests]]
    assert alone == together


class Narrow(StreamedDecoder):
    """One whose embeddings, as a trained model's, lie in few directions."""

    def embed(self, ids):
        found, generator = super().embed(ids), np.random.default_rng(5)
        few = generator.normal(size=(found.shape[-1], 8)) @ generator.normal(size=(8, found.shape[-1]))
        return found @ torch.from_numpy(few).float() / 8


def choose(mixture, folder, windows):
    """Layer 0's decoder, and what random tokens [windows, 32] chose."""
    decoder, ids = Narrow(mixture), np.random.default_rng(4).integers(2, 96, (windows, 32))
    recipe, _ = resolve(Request(precision="int4"), capabilities("cpu"), 64, "int4", calibrated=True, rotates=False)
    configs = quant_configs(recipe, decoder.geometry)["decode"]
    return decoder, calibrate(decoder, ids, recipe, configs, folder, silent)


def measure_loss(decoder, matrices) -> float:
    """Mean square error of layer 0's output on tokens that calibration did not see, with other matrices of experts."""
    layer, hidden = decoder.layer(0), decoder.embed(torch.tensor(np.random.default_rng(6).integers(2, 96, (8, 32))))
    wanted = decoder.run(layer, hidden)[0]
    for name, matrix in matrices.items():
        weight = layer.get_parameter(name.removeprefix("model.layers.0."))
        weight.data = torch.from_numpy(matrix).view_as(weight)
    return float((decoder.run(layer, hidden)[0] - wanted).square().mean())


def compare(decoder, store):
    """What the chosen integers of experts lose, of what those nearest lose."""
    item = decoder.geometry.mixtures[0]
    grid, names = fit_block(Grid(4, 64, symmetric=False), item), [f"{part.name}.weight" for part in item.parts]
    found = {name: Calibrated(store).chosen(name, grid).dequantize() for name in names}
    nearest = {name: rtn.quantize(decoder.rows(name).flatten(0, 1).numpy(), grid).dequantize() for name in names}
    return measure_loss(decoder, found) / measure_loss(decoder, nearest)


def test_a_text_chooses_integers_of_experts_that_lose_less(mixture, tmp_path, monkeypatch):
    decoder, store = choose(mixture, tmp_path / "a", 64)
    assert compare(decoder, store) <= MOST_LOSS
    assert store.read("state")["experts"].tolist() == [16, 0]
    folded = {name.rpartition(":")[2] for name in store.read("layer-000") if name.startswith(("rows:", "columns:"))}
    assert not any("experts" in name or "post_attention" in name for name in folded)
    read = Read.rows  # planted: inputs of no direction
    monkeypatch.setattr(Read, "rows", lambda self, *which: torch.randn_like(read(self, *which)))
    assert compare(*choose(mixture, tmp_path / "b", 64)) > MOST_LOSS


def test_experts_that_saw_few_tokens_share_what_their_layer_read(mixture, tmp_path, monkeypatch):
    decoder, store = choose(mixture, tmp_path / "a", 1)
    assert store.read("state")["experts"].tolist() == [0, 16]
    shared = compare(decoder, store)
    monkeypatch.setattr("llmc.optimize.calibrate.layers.SHARED_TOKENS", 1e-6)
    assert shared < min(1, compare(*choose(mixture, tmp_path / "b", 1)))


def test_equal_bits_are_not_promised(mixture, tmp_path):
    build(BuildRequest(mixture, tmp_path / "b", max_context=64))
    assert read_bundle(tmp_path / "b").graphs["decode"].invariance.rows == 0
    for level in ("batch", "strict"):
        with pytest.raises(UsageError, match=r"has experts.*use determinism 'fast'"):
            load(tmp_path / "b", determinism=level)


def test_the_plan_counts_every_expert(mixture, tmp_path):
    geometry, memory = (
        read_export(mixture).geometry,
        build(BuildRequest(mixture, tmp_path / "b", max_context=64)).manifest.memory,
    )
    codes_and_scales = sum(item.size for item in geometry.mixtures) * (1 + 4 / 32)
    assert memory.parts(1)["experts"] == round(EXPERT_COPIES * codes_and_scales)


def test_products_of_each_expert_are_planned_as_linears(exported):
    geometry = read_export(exported("gemma4-experts-beside-mlp").export).geometry
    int8 = WeightOnly(Grid(8, 32))
    for item in geometry.mixtures:
        linears = sum(linear_bytes(part, int8, copies=BLOCK_COPIES) for part in item.parts)
        assert item.activation == "gelu_tanh" and expert_bytes(item, int8) == item.count * linears
