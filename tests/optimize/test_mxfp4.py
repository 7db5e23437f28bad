"""Experts in MXFP4 stay the checkpoint's bytes, from gpt-oss's published form to tokens at every level."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from doubles import mxfp4
from doubles.lowerings import difference, open_session
from safetensors.torch import load_file, save_file

from llmc.bundle import MADE_FILE, WEIGHTS_FILE, read_export
from llmc.bundle.model.linear import Codes
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest, Request
from llmc.runtime import load

# Of the largest logit: sums in another order cost 1e-6; a sink, a limit or a bias left out more than 1e-2.
TOLERANCE = 1e-4
# Mean KL: of 8 bits in all but the experts 0.004 was seen, of 4 bits chosen anew 0.17.
MOST_KL = {"source": 0.02, "int8": 0.02, "int4": 0.5}
NAME = "gpt_oss-sinks-clamped-experts-bf16"
EXPERT = "model.layers.0.mlp.experts.down_proj"
# Floats in all but the experts.
EXACT = Request(head="fp32", layers={"*_proj": "fp32"})
PROMPTS = [np.random.default_rng(seed).integers(2, 96, 9 * seed).tolist() for seed in (1, 2, 3)]
NEW = 8


@pytest.fixture(scope="module")
def gpt_oss(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and transformers with the floats that its experts stand for."""
    case, folder = exported(NAME), tmp_path_factory.mktemp("gpt_oss") / "checkpoint"
    shutil.copytree(case.checkpoint, folder)
    reference = type(case.reference)(case.checkpoint)
    reference.model.load_state_dict({name: it.float() for name, it in mxfp4.quantize(folder).items()})
    export(folder, folder.parent / "export")
    return folder, reference


@pytest.fixture(scope="module")
def bundle(gpt_oss: tuple[Path, Any]) -> Path:
    """Built as by default."""
    folder = gpt_oss[0].parent / "bundle"
    build(BuildRequest(gpt_oss[0].parent / "export", folder, max_context=64))
    return folder


def test_the_export_copies_no_expert_and_equals_transformers(gpt_oss):
    folder, reference = gpt_oss
    geometry, ids = read_export(folder.parent / "export").geometry, np.array([PROMPTS[1]])
    assert not (folder.parent / "export" / MADE_FILE).exists()
    assert {item.codes for item in geometry.mixtures} == {Codes(4, 32, zero_points=False, kind="mxfp4")}
    feeds = {"input_ids": ids, "past_lengths": np.zeros(1, np.int64), "logit_indices": np.arange(ids.size)[None]}
    feeds |= {name: np.zeros(it.shape_of(1, ids.size), np.float32) for it in geometry.caches for name in it.inputs}
    wanted = reference(ids)
    [logits] = open_session(folder.parent / "export" / "decoder.onnx").run(["logits"], feeds)
    assert difference(logits, wanted) <= TOLERANCE * np.abs(wanted).max()
    decoder = StreamedDecoder(folder.parent / "export")
    hidden = decoder.embed(torch.tensor(ids))
    for index in range(geometry.layers):
        hidden, _ = decoder.run(decoder.layer(index), hidden)
    streamed = decoder.norm()(hidden) @ decoder.rows(decoder.head).mT
    assert difference(streamed.numpy(), wanted) <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize(
    "part", ["self_attn.sinks", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "mlp.router.bias"]
)
def test_a_part_left_out_exceeds_the_tolerance(gpt_oss, part):
    reference, ids = gpt_oss[1], np.array([PROMPTS[1]])
    wanted, vector = reference(ids), reference.model.get_parameter(f"model.layers.1.{part}")
    kept = vector.data.clone()
    vector.data.zero_()
    assert difference(reference(ids), wanted) > TOLERANCE * np.abs(wanted).max()
    vector.data.copy_(kept)


def test_the_bundle_has_the_checkpoints_bytes(gpt_oss, bundle):
    stored, weights = load_file(gpt_oss[0] / "model.safetensors"), (bundle / WEIGHTS_FILE).read_bytes()
    experts = {value.name: value.const_value for value in ir.load(bundle / "decoder.onnx").graph.initializers.values()}
    for layer in range(2):
        for part in ("gate_up", "down"):
            for ending, own in (("blocks", ""), ("scales", ".scales")):
                kept = experts[f"model.layers.{layer}.experts.{part}_proj.weight.experts.mxfp4{own}"]
                bytes_kept = weights[kept.offset : kept.offset + kept.length]
                name = f"model.layers.{layer}.mlp.experts.{part}_proj_{ending}"
                assert bytes_kept == stored[name].numpy().tobytes()


@pytest.mark.parametrize("precision", MOST_KL)
def test_other_precisions_are_chosen_from_what_the_codes_stand_for(gpt_oss, tmp_path, precision):
    manifest = build(
        BuildRequest(gpt_oss[0].parent / "export", tmp_path / "b", precision=precision, max_context=64)
    ).manifest
    assert max(phase.mean_kl for phase in manifest.quality.phases.values()) <= MOST_KL[precision]


def test_a_text_chooses_integers_of_experts(gpt_oss, tmp_path):
    source = Path(shutil.copytree(gpt_oss[0].parent / "export", tmp_path / "export"))
    (source / "tokenizer.json").unlink()  # it may be a link
    characters = {"type": "BPE", "vocab": {chr(ord(" ") + number): number for number in range(95)}, "merges": []}
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": characters}))
    text = {"decoder": StreamedDecoder, "samples": 8, "length": 32}
    made = {}
    for name, calibration in (("gptq", text), ("rtn", {})):
        manifest = build(
            BuildRequest(source, tmp_path / name, precision="int4", **calibration, recipe=Request(block_size=32))
        ).manifest
        assert max(phase.mean_kl for phase in manifest.quality.phases.values()) <= MOST_KL["int4"]
        weights, graph = (tmp_path / name / WEIGHTS_FILE).read_bytes(), ir.load(tmp_path / name / "decoder.onnx").graph
        stored = graph.initializers[f"{EXPERT.replace('.mlp', '')}.weight.experts.int4x32z"].const_value
        made[name] = manifest.recipe.calibration, weights[stored.offset : stored.offset + stored.length]
    used = made["gptq"][0]
    assert used.experts + used.nearest == sum(item.count for item in read_export(source).geometry.mixtures)
    assert made["gptq"][1] != made["rtn"][1] and used.experts


def test_tokens_are_those_of_transformers(gpt_oss, tmp_path):
    folder, reference = gpt_oss
    build(BuildRequest(folder.parent / "export", tmp_path / "b", recipe=EXACT, max_context=64))
    with load(tmp_path / "b", prefill_chunk=8) as model:
        for prompt in PROMPTS:
            answer = model.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True).token_ids
            logits = reference(np.array([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(answer)


@pytest.mark.parametrize("level", ["batch", "strict"])
def test_answers_are_the_same_alone_and_beside_others(bundle, level):
    with load(bundle, determinism=level, prefill_chunk=8) as model:
        requests = [model.request(prompt, max_tokens=NEW, temperature=0) for prompt in PROMPTS]
        alone = [model.submit(request).result().token_ids for request in requests]
        together = [handle.result().token_ids for handle in [model.submit(request) for request in requests]]
    assert alone == together


# Of what is mapped: packing copies would cost all of it and more, as of 4 bits chosen anew; 0.25 were seen.
MOST_GROWTH = 0.5
LOAD = """
import sys, onnxruntime, llmc.runtime.loading
print(open("/proc/self/status").read())
llmc.runtime.load(sys.argv[1], self_test=False)
print(open("/proc/self/status").read())
"""


@pytest.mark.slow
def test_experts_are_mapped_and_not_copied_at_load(write_random, tmp_path):
    checkpoint = write_random(NAME, hidden_size=256, intermediate_size=512, num_local_experts=16)
    mxfp4.quantize(checkpoint)
    export(checkpoint, tmp_path / "e")
    parts = build(BuildRequest(tmp_path / "e", tmp_path / "b", max_context=64)).manifest.memory.parts(64)
    assert parts["mapped experts"] == 2 * 16 * 3 * 256 * 512 * 17 // 32
    ran = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "b")], capture_output=True, text=True, check=True)
    before, after = (int(kilobytes) for kilobytes in re.findall(r"RssAnon:\s*(\d+) kB", ran.stdout))
    assert (after - before) * 1024 < MOST_GROWTH * parts["mapped experts"]


def change(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def put_floats(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        del tensors[f"{EXPERT}_{part}"]
    tensors[EXPERT] = torch.zeros(8, 96, 64)


@pytest.mark.threat("packed-tensors")
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(f"{EXPERT}_blocks"), r"down_proj_blocks is missing beside its scales"),
        (lambda tensors: tensors.pop(f"{EXPERT}_scales"), r"down_proj_scales is missing beside its blocks"),
        (
            lambda tensors: tensors.update({f"{EXPERT}_scales": tensors[f"{EXPERT}_scales"][:, :, :-1].clone()}),
            r"down_proj_scales is U8 \[8, 64, 2\], expected U8 \[8, 64, 3\]",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}_blocks": tensors[f"{EXPERT}_blocks"].flatten(2)}),
            r"down_proj_blocks is U8 \[8, 64, 48\], expected U8 \[experts, outputs, inputs / 32, 16\]",
        ),
        (
            lambda tensors: tensors.update(
                {f"{EXPERT}_{part}": tensors[f"{EXPERT}_{part}"][:4].clone() for part in ("blocks", "scales")}
            ),
            r"down_proj.weight has shape \[4, 64, 96\], but config.json asks for \[8, 64, 96\]",
        ),
        (put_floats, r"only some weights of model.layers.0.experts are in MXFP4"),
    ],
    ids=["no blocks", "no scales", "fewer scales", "no block", "fewer experts", "floats beside"],
)
def test_tensors_that_contradict_each_other_are_refused(gpt_oss, tmp_path, edit, words):
    with pytest.raises(CheckpointError, match=words):
        export(change(gpt_oss[0], tmp_path / "c", edit), tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "gelu", r"hidden_act='gelu' .*silu"),
        ("quantization_config", {**mxfp4.CONFIG, "bits": 3}, r"bits=3 is not known"),
        ("rope_parameters", None, r"rope_scaling=None .*yarn"),
    ],
)
def test_settings_that_are_not_computed_are_refused(gpt_oss, tmp_path, key, value, words):
    folder = change(gpt_oss[0], tmp_path / "c", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(folder)


@pytest.mark.parametrize(("exponent", "is_taken"), [(0, True), (253, False)])
def test_scales_are_taken_as_far_as_the_kernel_holds_them(gpt_oss, tmp_path, exponent, is_taken):
    own = Path(shutil.copytree(gpt_oss[0].parent / "export", tmp_path / "e"))
    tensors = load_file(own / "model.safetensors")
    tensors[f"{EXPERT}_scales"][7, 5].fill_(exponent)
    save_file(tensors, own / "model.safetensors")
    refused = pytest.raises(CheckpointError, match=r"holds the exponent 253, expected at most 252")
    with contextlib.nullcontext() if is_taken else refused:
        build(BuildRequest(tmp_path / "e", tmp_path / "b", max_context=64))
