"""A mixture of experts goes the whole way: built in each precision, judged, planned and run."""

import numpy as np
import pytest

from llmc.bundle import read_bundle, read_export
from llmc.errors import UsageError
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.layers import calibrate
from llmc.optimize.lower.context import WeightOnly, quant_configs
from llmc.optimize.plan.memory import BLOCK_COPIES, EXPERT_COPIES, expert_bytes, linear_bytes
from llmc.optimize.progress import silent
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime import load

# Mean KL of random weights, whose routers are near ties more often than trained ones: 0.014 and 0.34 were seen.
MOST_KL = {"fp32": 1e-6, "int8": 0.05, "int4": 1.0}
PROMPTS = [np.random.default_rng(seed).integers(2, 96, 5 * seed).tolist() for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def mixture(exported):
    return exported("olmoe-unnormalized").export


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, it) for name in ("olmoe-unnormalized", "gemma4-experts-beside-mlp") for it in MOST_KL),
        ("deepseek_v2-latent-keys-grouped-experts", "int8"),
    ],
)
def test_a_mixture_is_built_and_runs_alone_as_together(exported, tmp_path, name, precision):
    manifest = build(exported(name).export, tmp_path / "b", precision=precision, max_context=64).manifest
    assert manifest.recipe.phases == "shared" and not manifest.recipe.rotated
    assert max(phase.mean_kl for phase in manifest.quality.phases.values()) <= MOST_KL[precision]
    with load(tmp_path / "b", prefill_chunk=8) as model:
        requests = [model.request(prompt, max_tokens=8, temperature=0) for prompt in PROMPTS]
        alone = [model.submit(request).result().token_ids for request in requests]
        together = [handle.result().token_ids for handle in [model.submit(request) for request in requests]]
    assert alone == together


def test_a_text_chooses_integers_of_linears_and_leaves_experts(mixture, tmp_path):
    decoder, ids = StreamedDecoder(mixture), np.random.default_rng(4).integers(2, 96, (4, 32))
    recipe, _ = resolve(Request(precision="int4"), capabilities("cpu"), 64, "int4", calibrated=True, rotates=False)
    configs = quant_configs(recipe, decoder.geometry)["decode"]
    chosen = calibrate(decoder, ids, recipe, configs, tmp_path / "store", silent).read("layer-000")
    names = {name.rpartition(":")[2] for name in chosen if name.startswith("values:")}
    assert names == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    folded = {name.rpartition(":")[2] for name in chosen if name.startswith(("rows:", "columns:"))}
    assert not any("experts" in name or "post_attention" in name for name in folded)


def test_equal_bits_are_not_promised(mixture, tmp_path):
    build(mixture, tmp_path / "b", max_context=64)
    assert read_bundle(tmp_path / "b").graphs["decode"].invariance.rows == 0
    for level in ("batch", "strict"):
        with pytest.raises(UsageError, match=r"has experts.*use determinism 'fast'"):
            load(tmp_path / "b", determinism=level)


@pytest.mark.parametrize("target", ["cuda", "tensorrt-rtx, whose parser .* takes no NonZero"])
def test_gpus_are_refused(mixture, tmp_path, target):
    said = f"has mixtures of experts, which llmc lowers for cpu alone; the target is {target}"
    target = target.partition(",")[0]
    with pytest.raises(UsageError, match=said):
        build(mixture, tmp_path / "b", target=target, max_context=64)


def test_the_plan_counts_every_expert(mixture, tmp_path):
    geometry, memory = read_export(mixture).geometry, build(mixture, tmp_path / "b", max_context=64).manifest.memory
    codes_and_scales = sum(item.size for item in geometry.mixtures) * (1 + 4 / 32)
    assert memory.parts(1)["experts"] == round(EXPERT_COPIES * codes_and_scales)


def test_products_of_each_expert_are_planned_as_linears(exported):
    geometry = read_export(exported("gemma4-experts-beside-mlp").export).geometry
    int8 = WeightOnly(Grid(8, 32))
    for item in geometry.mixtures:
        linears = sum(linear_bytes(part, int8, copies=BLOCK_COPIES) for part in item.parts)
        assert item.activation == "gelu_tanh" and expert_bytes(item, int8) == item.count * linears
