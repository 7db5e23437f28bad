"""GGUF files: what was a Hugging Face checkpoint computes what it computed before, or what its rounded weights do."""

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime
import pytest
from doubles import diffusing, mxfp4
from doubles.ggufs import PLACES, TOKENIZER, Kind, dequantize, random_blocks, write_gguf
from onnx import TensorProto, helper

from llmc.bundle import MADE_FILE, read_export
from llmc.bundle.model.linear import Codes
from llmc.bundle.model.names import HEAD
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.ggml_ops import function
from llmc.export.graph import IR_VERSION
from llmc.export.ops import DOMAIN, OPSET
from llmc.export.parts.experts import STEEP
from llmc.export.sources.checkpoint import Checkpoint, read_checkpoint
from llmc.export.sources.codes import GgmlTensor, flatten_tensors
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.streaming import StreamedDecoder
from llmc.exported import read_weights, rows_of
from llmc.ggml import LAYOUTS
from llmc.origin import check_unchanged

# Of attention whose queries and keys are magnified: the converter states one magnitude.
LATENT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
# Cases of the converter's every turn: rows of rotated heads, biases, factors of the rope, a tied head, wide heads.
CONVERTED: dict[str, dict[str, Any]] = {
    "llama-biases": {},
    "llama-llama3-rope-tied": {},
    "llama-yarn-rope": {},
    "llama-linear-rope-no-groups-fp16": {},
    "qwen2-tied-bf16": {"dtype": "float16"},
    "qwen3-tied-sharded": {},
    # The factor of longrope is 2, which float32 holds.
    "phi3-packed-window-fp16": {"original_max_position_embeddings": 4, "max_position_embeddings": 256},
    "gemma3-two-ropes": {"query_pre_attn_scalar": 32},  # the width of a head: the file does not say
    "gemma-bf16": {"dtype": "float32"},
    "gemma2-softcaps": {"query_pre_attn_scalar": 16},
    "phi-head-bias-fp16": {},
    "granite-multipliers": {},
    "granitemoehybrid-dense": {},
    "granitemoehybrid-mamba-bf16": {"dtype": "float32", "num_local_experts": 4},
    "mistral-window-wide-heads": {"sliding_window": None},
    "olmo2-norms-behind": {},
    "olmo3-yarn-in-full-layers": {},
    "smollm3-every-second-layer-rotated": {"no_rope_layer_interval": 4, "use_sliding_window": False},
    "seed_oss-output-bias": {},
    "ernie4_5-interleaved-rope-biases": {},
    "glm4-sandwich": {},
    "exaone4-window-rotated": {},
    "hunyuan-norm-after-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "cohere-parallel": {},
    "cohere2-window-rotated": {"layer_types": ["sliding_attention"] * 2},
    "starcoder2-window-fp16": {"sliding_window": None},
    "stablelm-parallel-bf16": {"dtype": "float32"},
    "gpt_neox-two-norms": {},
    "gpt2-scale-by-layer": {"scale_attn_by_inverse_layer_idx": False},
    "ministral3-growing-queries": {},
    "lfm2-short-convolutions": {"conv_bias": False},
    "qwen3_5-delta-and-gates": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_next-packed-by-key-heads": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_moe-first-layer-dense-bf16": {"mlp_only_layers": [], "dtype": "float32"},
    "gemma4-keys-are-values": {},
    "gemma4-experts-beside-mlp": {},
    "gemma4-shared-caches-per-layer-inputs": {"dtype": "float32"},
    "olmoe-unnormalized": {},
    "mixtral-experts": {},
    "granitemoe-experts": {},
    "nemotron_h-one-part-per-layer": {"time_step_min": 0.001},
    "deepseek_v2-latent-keys-grouped-experts": {"rope_parameters": LATENT_ROPE},
    "deepseek_v3-latent-queries-corrected-groups": {},
}
# Of A_log, which a converter makes A of in float32.
LOG_TOLERANCE = 1e-6
ONE = np.ones(1, np.float32)
# Of products of three floats in another order.
ORDER_TOLERANCE = 1e-6
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MIXED = {
    "token_embd.weight": "Q8_0",
    "blk.0.attn_q.weight": "Q4_0",
    "blk.0.attn_k.weight": "Q5_0",
    "blk.0.attn_v.weight": "Q4_1",
    "blk.0.attn_output.weight": "Q5_1",
    "blk.0.ffn_gate.weight": "Q4_K",
    "blk.0.ffn_up.weight": "Q5_K",
    "blk.0.ffn_down.weight": "Q6_K",
    "output.weight": "BF16",
}
# Of an expert.
PARTS = ("gate", "up", "down")
# Largest difference of logits (up to 12) from transformers with the same weights, in float32: sums in other orders.
# To leave the rows of q and k in pairs costs more than 1.
LOGIT_TOLERANCE = 5e-4


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor as the export will have it, blocks as the gguf package unpacks them."""
    tensor = checkpoint.tensors[name]
    if isinstance(tensor, GgmlTensor):
        parts = [np.memmap(checkpoint.folder / it.file, np.uint8, "r", it.offset, it.length) for it in tensor.stored]
        packed = np.concatenate([part.reshape(it.shape[0], -1) for part, it in zip(parts, tensor.stored, strict=True)])
        found = gguf.dequantize(packed if tensor.rows is None else packed[tensor.rows], Kind[tensor.dtype])
        return (found if tensor.columns is None else found[:, tensor.columns]).reshape(tensor.shape)
    if isinstance(tensor, MadeTensor):
        return np.concatenate(list(tensor.pieces())).reshape(tensor.shape)
    data = (checkpoint.folder / tensor.file).read_bytes()[tensor.offset : tensor.offset + tensor.length]
    return np.frombuffer(data, array_type(tensor.dtype)).reshape(tensor.shape)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_checkpoint_comes_back(name, random_checkpoint, tmp_path):
    folder = random_checkpoint.__wrapped__(name, **CONVERTED[name])  # not cached: values are lists and tables
    assert_same(folder, write_gguf(folder, tmp_path / "model.gguf"))


def test_multipliers_of_falcon_h1_are_in_the_weights_of_its_file(random_checkpoint, onnxruntime_run, tmp_path):
    """The converter multiplies; the graph of the file computes what that of the checkpoint does."""
    folder = random_checkpoint.__wrapped__("falcon_h1-both-mixers-multipliers", mamba_norm_before_gate=False)
    path, ids = write_gguf(folder, tmp_path / "model.gguf"), np.random.default_rng(0).integers(2, 29, (1, 12))
    feeds = {"input_ids": ids, "past_lengths": np.zeros(1, np.int64), "logit_indices": np.arange(12)[None]}
    feeds["new_lengths"] = np.full(1, 12)
    logits = []
    for number, source in enumerate((folder, path)):
        output = export(source, tmp_path / str(number)).output
        caches = read_export(output).geometry.caches
        states = {name: np.zeros(it.shape_of(1, 12), np.float32) for it in caches for name in it.inputs}
        logits.append(onnxruntime_run(output)(feeds | states)[0])
    assert np.abs(logits[1] - logits[0]).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_experts_of_nemotron_h_have_no_gate(kind, random_checkpoint, tmp_path):
    """Blocks come apart into codes and scales, since gates are their products with a number."""
    sizes = {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    sizes |= {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32, "routed_scaling_factor": 2.5}
    kinds = {"layers_block_type": ["linear_attention", "moe", "full_attention"], "time_step_min": 0.001}
    folder = random_checkpoint.__wrapped__("nemotron_h-one-part-per-layer", **sizes, **kinds)
    named = defaultdict(lambda: "F32", {f"blk.1.ffn_{part}_exps.weight": kind for part in ("up", "down")})
    path = write_gguf(folder, tmp_path / "model.gguf", named)
    if kind == "F32":
        assert_same(folder, path)
        return
    stored = {it.name: it for it in gguf.GGUFReader(path).tensors}
    up = gguf.dequantize(stored["blk.1.ffn_up_exps.weight"].data, Kind.Q4_0)
    made = read_checkpoint(path).tensors["model.layers.1.experts.gate_up_proj.weight"]
    assert made.kind == Codes(4, 32, zero_points=False)
    export(path, tmp_path / "export")
    found = rows_of(read_weights(tmp_path / "export")["model.layers.1.experts.gate_up_proj.weight"])
    np.testing.assert_array_equal(found.reshape(made.shape), np.concatenate([up * STEEP, up], 1))


@pytest.mark.parametrize("family", diffusing.SHIFTS)
def test_a_diffusion_model_comes_back_and_others_of_its_architecture_are_refused(family, diffusion_models, tmp_path):
    folder, shift = diffusion_models / family, bool(diffusing.SHIFTS[family])
    metadata = {"attention.causal": False, "rope.freq_base": diffusing.SIZES["rope_theta"]}
    names = [*TOKENIZER["tokens"], *(f"t{i}" for i in range(len(TOKENIZER["tokens"]), diffusing.VOCAB))]
    ids = {"eos_token_id": diffusing.EOS, "mask_token_id": diffusing.MASK}
    tokenizer = {**TOKENIZER, **ids, "tokens": names, "token_type": [3, 3, *[1] * 27, *[3] * (len(names) - 29)]}
    assert_same(folder, write_gguf(folder, tmp_path / "plain.gguf", tokenizer=tokenizer, metadata=metadata))
    for number, stated in enumerate(({"attention.causal": True}, {"diffusion.shift_logits": not shift})):
        own = {name: value for name, value in stated.items() if name in metadata}
        path = tmp_path / f"{number}.gguf"
        write_gguf(folder, path, tokenizer={**tokenizer, **stated}, metadata={**metadata, **own})
        with pytest.raises(CheckpointError, match=f"{next(iter(stated))} is {next(iter(stated.values()))}"):
            read_checkpoint(path)


def assert_same(folder: Path, path: Path) -> None:
    before, found = read_checkpoint(folder), read_checkpoint(path)
    # What is called by the name of another family computes the same.
    kept = {"model_type": before.config.model_type, "packed": before.config.packed, "renamed": before.config.renamed}
    assert replace(found.config, **kept) == before.config
    assert found.tensors.keys() == before.tensors.keys()
    for tensor in before.tensors:
        allowed = LOG_TOLERANCE * tensor.endswith("A_log")
        np.testing.assert_allclose(values(found, tensor), values(before, tensor), rtol=0, atol=allowed)


def test_experts_of_gpt_oss_come_back_bit_for_bit(random_checkpoint, tmp_path):
    changes = {"dtype": "float32", "swiglu_limit": 7.0}  # the limit is llama.cpp's, and no key
    folder = random_checkpoint.__wrapped__("gpt_oss-sinks-clamped-experts-bf16", **changes)
    mxfp4.quantize(folder)
    before, found = read_checkpoint(folder), read_checkpoint(write_gguf(folder, tmp_path / "model.gguf"))
    assert replace(found.config, packed=before.config.packed, renamed=before.config.renamed) == before.config
    tensors = [replace(each, tensors=dict(flatten_tensors(each.tensors))) for each in (before, found)]
    assert tensors[0].tensors.keys() == tensors[1].tensors.keys()
    for name in tensors[0].tensors:
        np.testing.assert_array_equal(values(tensors[1], name), values(tensors[0], name))


@pytest.mark.parametrize("name", ["llama-biases", "phi-head-bias-fp16"])
@pytest.mark.parametrize("width", [0, 1, 3, [-1]], ids=str)
def test_a_head_of_an_odd_width_is_refused_by_a_sentence(random_checkpoint, tmp_path, name, width):
    changes = {"attention.key_length": width, "attention.value_length": None, "rope.dimension_count": None}
    path = write_gguf(random_checkpoint(name), tmp_path / "model.gguf", metadata=changes)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_experts_of_gpt_oss_in_other_types_are_refused(random_checkpoint, tmp_path):
    folder = random_checkpoint.__wrapped__("gpt_oss-sinks-clamped-experts-bf16", dtype="float32")
    mxfp4.quantize(folder)
    path = write_gguf(folder, tmp_path / "model.gguf")
    content = path.read_bytes().replace(b"ffn_up_exps.weight", b"ffn_up_expz.weight", 1)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight is missing .*, expected MXFP4"):
        read_checkpoint(path)


def test_longrope_has_the_factor_that_the_file_states(random_checkpoint, tmp_path):
    stated = {"rope.scaling.attn_factor": 1.5}
    path = write_gguf(random_checkpoint("phi3-packed-window-fp16"), tmp_path / "model.gguf", metadata=stated)
    assert read_checkpoint(path).config.ropes[0].magnitude == 1.5


def test_defaults_of_sampling_are_taken_over(random_checkpoint, tmp_path):
    advised = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.min_p": 0.25}
    path = write_gguf(random_checkpoint("llama-biases"), tmp_path / "model.gguf", metadata=advised)
    found = read_checkpoint(path).generation
    assert (found.do_sample, found.temperature, found.top_k, found.top_p, found.min_p) == (True, 0.5, 20, None, 0.25)
    assert (found.bos_token_id, found.eos_token_ids) == (0, (1,))


def test_a_penalty_is_taken_over_and_other_samplers_are_noted(random_checkpoint, tmp_path):
    advised = {"general.sampling.penalty_repeat": 1.25, "general.sampling.mirostat": 2, "general.sampling.xtc_x": 0.5}
    path = write_gguf(random_checkpoint("llama-biases"), tmp_path / "model.gguf", metadata=advised)
    found = read_checkpoint(path)
    assert (found.generation.do_sample, found.generation.repetition_penalty) == (False, 1.25)
    left_out = ("mirostat=2", "xtc_x=0.5")
    assert found.notes == tuple(f"model.gguf: {name} is not supported and was left out" for name in left_out)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_weights_stay_in_the_file(kind, random_checkpoint, tmp_path):
    """All but the rows of q and k, whose order is another one."""
    path = write_gguf(random_checkpoint("llama-biases"), tmp_path / "model.gguf", kind)
    found = read_checkpoint(path)
    made = {name for name, tensor in found.tensors.items() if isinstance(tensor, MadeTensor)}
    turned = {name for name in found.tensors if ".q_proj." in name or ".k_proj." in name}
    assert (made, found.files) == (turned, (path,))
    assert {tensor.dtype for name, tensor in found.tensors.items() if name.endswith("proj.weight")} == {kind}
    assert found.notes == ()


@pytest.fixture(scope="module")
def mixed(random_checkpoint, tmp_path_factory) -> Path:
    """A llama of which every matrix is of another type."""
    folder = random_checkpoint("llama-biases", attention_bias=False, mlp_bias=False, num_hidden_layers=1, **WIDE)
    return write_gguf(folder, tmp_path_factory.mktemp("mixed") / "model.gguf", MIXED)


@pytest.fixture(scope="module")
def unpacked(mixed) -> Any:
    """transformers' model of it: the config and the float32 weights that it reads from the file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(mixed)["config"]
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval()
    weights = load_gguf_checkpoint(mixed, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    model.load_state_dict(weights["tensors"])
    return model


def test_linears_and_tables_stay_in_the_files_blocks(mixed, unpacked):
    found = read_checkpoint(mixed)
    for name, weight in unpacked.state_dict().items():
        np.testing.assert_array_equal(values(found, name), weight.numpy().astype(values(found, name).dtype))
    assert sum(isinstance(tensor, GgmlTensor) for tensor in found.tensors.values()) == 8
    assert (found.files, found.notes, found.made_bytes) == ((mixed,), (), 4 * (256 + 128))  # q and k: places of rows


@pytest.mark.parametrize(("kind", "bits", "block"), [("Q6_K", 6, 16), ("Q5_K", 5, 32)])
def test_a_tied_table_keeps_its_codes_and_minima(kind, bits, block, random_checkpoint, tmp_path):
    folder = random_checkpoint("llama-llama3-rope-tied", **WIDE)
    found = read_checkpoint(write_gguf(folder, tmp_path / "model.gguf", kind)).geometry
    assert found.table_codes == Codes(bits, block, zero_points=False, offsets=kind == "Q5_K")
    assert found.linear[HEAD].codes == Codes(8, block, zero_points=False, offsets=kind == "Q5_K")


def test_an_export_refers_to_every_part_of_a_model_which_may_neither_change_nor_go(random_checkpoint, tmp_path):
    first = write_gguf(random_checkpoint("llama-biases"), tmp_path / "model.gguf", "Q8_0", parts=3)
    found, output = read_checkpoint(first), tmp_path / "export"
    report, parts = export(first, output), sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3 and all((output / part.name).samefile(part) for part in parts)
    assert report.new_bytes == sum(size for name, size in report.files.items() if not name.endswith(".gguf"))
    weights = read_weights(output)
    for name in found.tensors:
        np.testing.assert_array_equal(rows_of(weights[name]), values(found, name))
    with parts[1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match="were overwritten after the export"):
        check_unchanged(output, read_export(output))
    (output / parts[2].name).unlink()
    with pytest.raises(CheckpointError, match=f"{parts[2].name} is missing"):
        read_weights(output)


def test_value_heads_are_in_order_in_integers_too(random_checkpoint, tmp_path):
    """A block of 32 columns lies within a head. What predicts further tokens is left out."""
    changes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3}
    folder = random_checkpoint.__wrapped__("qwen3_5-delta-and-gates", **changes, num_hidden_layers=3)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q8_0", metadata={"nextn_predict_layers": 1})
    before, found = read_checkpoint(folder), read_checkpoint(path)
    kept = [name for name, tensor in found.tensors.items() if isinstance(tensor, GgmlTensor)]
    assert len(found.config.layers) == 2 and len(kept) == 1 + 2 * 6
    for name in kept:
        rounded = gguf.quantize(values(before, name), Kind["Q8_0"])
        np.testing.assert_array_equal(values(found, name), gguf.dequantize(rounded, Kind["Q8_0"]))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_codes_scales_and_offsets_of_every_type_stand_for_what_gguf_unpacks(kind):
    """In numpy and in the ONNX function, to the last bit, of subnormal scales too."""
    layout = LAYOUTS[kind]
    plain = np.random.default_rng(0).normal(size=(4, 2 * layout.weights)).astype(np.float32)
    raw = random_blocks(plain.shape, kind) if kind in PLACES else gguf.quantize(plain, Kind[kind])
    for place in PLACES.get(kind, (0,)):
        raw[0, place : place + 2], raw[1, place : place + 2] = (3, 0), (3, 0x80)
    codes, expected = layout.codes.read(raw.reshape(8, layout.size)), dequantize(raw, kind)
    middle = 1 << (layout.table_kind.bits - 1)
    assert codes.dtype == np.int8 and -middle <= codes.min() and codes.max() < middle
    np.testing.assert_array_equal(layout.unpack(raw), expected)
    np.testing.assert_array_equal(run_function(kind, raw), expected)


def run_function(kind: str, raw: np.ndarray) -> np.ndarray:
    """What a graph of one such node makes of the bytes."""
    packed, weights = (
        helper.make_tensor_value_info(name, dtype, ["N", None])
        for name, dtype in (("packed", TensorProto.UINT8), ("weights", TensorProto.FLOAT))
    )
    node = helper.make_node(kind, ["packed"], ["weights"], domain=DOMAIN)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph([node], "blocks", [packed], [weights]),
        functions=[function(kind)],
        opset_imports=imports,
        ir_version=IR_VERSION,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"packed": raw})[0]
    return found


def test_an_export_of_blocks_computes_what_transformers_computes_with_them(mixed, unpacked, onnxruntime_run, tmp_path):
    import torch

    report, found = export(mixed, tmp_path / "export"), read_checkpoint(mixed)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", MADE_FILE} < set(report.files)
    ids = np.random.default_rng(1).integers(0, 96, (1, 20))
    feeds = {"input_ids": ids, "past_lengths": np.zeros(1, np.int64), "logit_indices": np.arange(20)[None]}
    for cache in read_export(report.output).geometry.caches:
        for part in ("key", "value"):
            feeds[f"past_key_values.{cache.name}.{part}"] = np.zeros(
                (1, cache.shape[0], 20, cache.shape[1]), np.float32
            )
    logits = onnxruntime_run(report.output)(feeds)[0]
    streamed = StreamedDecoder(report.output)
    for name in found.tensors:
        np.testing.assert_array_equal(streamed.rows(name).numpy(), values(found, name).astype(np.float32))
    rounded = {name: torch.from_numpy(values(found, name).astype(np.float32)) for name in unpacked.state_dict()}
    unpacked.load_state_dict(rounded)
    with torch.no_grad():
        expected = unpacked(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits - expected).max() <= LOGIT_TOLERANCE


def test_matrices_in_nvfp4_may_have_one_more_scale(random_checkpoint, tmp_path):
    """One of a matrix, and one of each expert; scales of activations are left out."""
    folder = random_checkpoint.__wrapped__("qwen3_moe-first-layer-dense-bf16", dtype="float32", mlp_only_layers=[])
    scaled = ["attn_output", *(f"ffn_{part}_exps" for part in ("gate", "up"))]
    factors = {name: np.linspace(0.5, 3, 8 if "exps" in name else 1, dtype=np.float32) for name in scaled}
    kinds = defaultdict(lambda: "F32", {f"blk.0.{name}.weight": "NVFP4" for name in scaled})
    more = {f"blk.0.{name}.scale": array for name, array in factors.items()} | {"blk.0.attn_output.input_scale": ONE}
    path = write_gguf(folder, tmp_path / "model.gguf", kinds, more=more)
    stored, found = {it.name: it for it in gguf.GGUFReader(path).tensors}, read_checkpoint(path).tensors
    floats = {it: gguf.dequantize(stored[f"blk.0.{it}.weight"].data, Kind.NVFP4) for it in scaled}
    floats = {it: values * factors[it].reshape(-1, *[1] * (values.ndim - 1)) for it, values in floats.items()}
    floats["both"] = np.concatenate([floats["ffn_gate_exps"], floats["ffn_up_exps"]], 1)
    for name, own in (("self_attn.o_proj", "attn_output"), ("experts.gate_up_proj", "both")):
        made = found[f"model.layers.0.{name}.weight"]
        assert made.kind == Codes(8, 16, zero_points=False) and made.shape == floats[own].shape
        weights = np.concatenate(list(made.codes.pieces())) * np.repeat(made.scales(), 16, 1)
        np.testing.assert_allclose(weights.reshape(made.shape), floats[own], rtol=ORDER_TOLERANCE)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_experts_keep_their_integers(kind, random_checkpoint, onnxruntime_run, tmp_path):
    """Gate and up in one stack, and the graph computes with what they stand for."""
    changes = {"dtype": "float32", "hidden_size": 256, "moe_intermediate_size": 256, "tie_word_embeddings": True}
    folder = random_checkpoint.__wrapped__("qwen3_moe-first-layer-dense-bf16", **changes, mlp_only_layers=[])
    kinds = defaultdict(lambda: "F32", {f"blk.{i}.ffn_{part}_exps.weight": kind for i in (0, 1) for part in PARTS})
    path = write_gguf(folder, tmp_path / "model.gguf", kinds)
    stored, found = {it.name: it for it in gguf.GGUFReader(path).tensors}, read_checkpoint(path)
    parts = [stored[f"blk.1.ffn_{part}_exps.weight"] for part in PARTS]
    gate, up, down = (gguf.dequantize(it.data, it.tensor_type) for it in parts)
    for name, expected in (("gate_up", np.concatenate([gate, up], 1)), ("down", down)):
        tensor = found.tensors[f"model.layers.1.experts.{name}_proj.weight"]
        assert isinstance(tensor, GgmlTensor) and tensor.shape == expected.shape
        np.testing.assert_array_equal(values(found, f"model.layers.1.experts.{name}_proj.weight"), expected)
    streamed = StreamedDecoder(export(path, tmp_path / "export").output).layer(1).experts
    np.testing.assert_array_equal(streamed.down_proj.weight.numpy(), down)
    feeds = {
        "input_ids": np.arange(9)[None],
        "past_lengths": np.zeros(1, np.int64),
        "logit_indices": np.arange(9)[None],
    }
    caches = read_export(tmp_path / "export").geometry.caches
    feeds |= {name: np.zeros(it.shape_of(1, 9), np.float32) for it in caches for name in it.inputs}
    assert np.isfinite(onnxruntime_run(tmp_path / "export")(feeds)[0]).all()
