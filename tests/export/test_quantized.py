"""Quantized checkpoints are exported with their codes, and compute what the floats compute that they stand for."""

import json

import numpy as np
import onnx_ir as ir
import pytest
from doubles import packers

from llmc.bundle import DECODER_FILE, read_export
from llmc.bundle.model.linear import Codes
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.keys import Keys
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.quantization import read_quantization
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.judge.reference import empty_caches

# As of unquantized checkpoints, see test_parity: both sides compute with the same floats. A code in another place, a
# zero point off by one or a scale of another group moves logits (up to 20) by more than 1.
LOGIT_TOLERANCE = 2e-4
IDS = np.random.default_rng(1).integers(0, 96, (2, 12))
PROJECTION = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", params=packers.SCHEMES)
def case(request, tmp_path_factory):
    """A quantized checkpoint's scheme, what it holds, and its export."""
    return packers.export_shared(request.param, tmp_path_factory)


def logits(run, folder):
    caches = empty_caches(read_export(folder).geometry.caches, *IDS.shape, "float32")
    rows = np.tile(np.arange(IDS.shape[1]), (len(IDS), 1))
    return run({"input_ids": IDS, "past_lengths": np.zeros(len(IDS), np.int64), "logit_indices": rows, **caches})[0]


def test_logits_equal_those_of_the_floats(case, onnxruntime_run):
    _, written, exported = case
    found = logits(onnxruntime_run(exported), exported)
    assert np.abs(found - written.logits(IDS)).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["awq", "gptq", "int8-channel", "nvfp4"])
def test_experts_with_codes_of_their_own_become_stacks(name, tmp_path, onnxruntime_run):
    """As Qwen3-30B-A3B's quantized checkpoints have them."""
    written = packers.write_checkpoint(packers.SCHEMES[name], tmp_path / "checkpoint", **packers.MIXTURE)
    exported = export(tmp_path / "checkpoint", tmp_path / "export").output
    found = logits(onnxruntime_run(exported), exported)
    assert np.abs(found - written.logits(IDS)).max() <= LOGIT_TOLERANCE
    [item] = read_export(exported).geometry.mixtures
    assert item.codes is not None and item.codes.zero_points == (name == "awq")


def test_experts_without_a_gate_keep_their_codes_too(tmp_path, onnxruntime_run):
    """As Nemotron 3's NVFP4 checkpoints have them."""
    sizes = {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"n_group": 1, "moe_shared_expert_intermediate_size": 48}
    kinds = {"model_type": "nemotron_h", "layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2}
    written = packers.write_checkpoint(packers.SCHEMES["nvfp4"], tmp_path / "checkpoint", **kinds, **sizes)
    exported = export(tmp_path / "checkpoint", tmp_path / "export").output
    found, expected = logits(onnxruntime_run(exported), exported), written.logits(IDS)
    assert np.abs(found - expected).max() <= LOGIT_TOLERANCE
    assert read_export(exported).geometry.mixtures[0].codes == Codes(8, 16, zero_points=False)


def test_experts_whose_columns_are_sorted_are_refused(tmp_path):
    packers.write_checkpoint(packers.SCHEMES["gptq-zeros-act-order"], tmp_path, **packers.MIXTURE)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight .*act-order, which llmc does not read"):
        read_checkpoint(tmp_path)


def test_the_tolerance_notices_a_zero_point_off_by_one(tmp_path, onnxruntime_run):
    written = packers.write_checkpoint(packers.SCHEMES["gptq"], tmp_path / "checkpoint")
    config = (tmp_path / "checkpoint" / "config.json").read_text()
    (tmp_path / "checkpoint" / "config.json").write_text(config.replace('": "gptq"}', '": "gptq_v2"}'))
    exported = export(tmp_path / "checkpoint", tmp_path / "export").output
    found = logits(onnxruntime_run(exported), exported)
    assert np.abs(found - written.logits(IDS)).max() > 1


def test_codes_are_kept_bit_for_bit(case):
    scheme, written, exported = case
    tensors = {value.name: value.const_value for value in ir.load(exported / DECODER_FILE).graph.initializers.values()}
    parts = {
        name.removeprefix(f"{PROJECTION}.weight"): array(tensor)
        for name, tensor in tensors.items()
        if name.startswith(f"{PROJECTION}.weight")
    }
    matrix, middle = written.matrices[PROJECTION], 1 << (scheme.grid.bits - 1)
    columns = parts.get(".order", np.arange(matrix.levels.shape[1]))
    np.testing.assert_array_equal(parts[""][:, columns] + middle, matrix.levels)
    np.testing.assert_array_equal(parts[".scales"], matrix.scales.astype(np.float32))
    assert (".zero_points" in parts, ".order" in parts) == (scheme.grid.zeros, scheme.grid.ordered)
    np.testing.assert_array_equal(parts.get(".zero_points", 0) + np.full(matrix.zeros.shape, middle), matrix.zeros)


def array(tensor):
    """An external tensor; integers as int16."""
    dtype = {"INT4": np.uint8, "INT8": np.int8, "INT32": np.int32, "FLOAT": np.float32}[tensor.dtype.name]
    data = np.fromfile(tensor.path, np.uint8, tensor.length, offset=tensor.offset).view(dtype)
    if tensor.dtype.name == "INT4":
        data = np.stack([data << 4, data & 0xF0], axis=1).reshape(-1).view(np.int8) >> 4
    found = data.reshape([int(size) for size in tensor.shape])
    return found if dtype == np.float32 else found.astype(np.int32)


def test_calibration_reads_the_floats_that_codes_stand_for(case):
    _, written, exported = case
    decoder = StreamedDecoder(exported)
    for module, matrix in written.matrices.items():
        np.testing.assert_array_equal(decoder.rows(f"{module}.weight"), matrix.floats)
        np.testing.assert_array_equal(decoder.rows(f"{module}.weight", 3, 7), matrix.floats[3:7])


def test_the_inventory_says_which_codes_there_are(case):
    scheme, _, exported = case
    for linear in read_export(exported).geometry.linears:
        found = linear.codes and (linear.codes.bits, linear.codes.block, linear.codes.zero_points)
        grid = scheme.grid
        assert found == (None if linear.layer is None else (grid.bits, grid.group or linear.inputs, grid.zeros))


def group_of(**weights):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FLOAT8 = {
    # As Ministral 3 and Devstral 2 are published, and with the scales of a config that says nothing of blocks.
    "a tensor, static": ({**FP8, "activation_scheme": "static"}, "weight_scale_inv", (0, 0), "bfloat16"),
    "exponents": ({**FP8, "weight_block_size": [16, 32]}, "weight_scale_inv", (16, 32), "float8_e8m0fnu"),
    "blocks": ({**FP8, "weight_block_size": [16, 32]}, "weight_scale_inv", (16, 32), "float32"),
    "a tensor": (FP8, "weight_scale", (0, 0), "float32"),
    "a tensor, compressed": (group_of(strategy="tensor"), "weight_scale", (0, 0), "bfloat16"),
    "rows": (group_of(strategy="channel"), "weight_scale", (1, 0), "float16"),
    "blocks, compressed": (group_of(strategy="block", block_structure=[16, 32]), "weight_scale", (16, 32), "bfloat16"),
}


@pytest.mark.parametrize("scheme", FLOAT8)
def test_float8_is_dequantized_as_it_is_defined(scheme, tmp_path):
    weights = packers.write_float8(tmp_path, *FLOAT8[scheme])
    checkpoint = read_checkpoint(tmp_path)
    for parameter, expected in weights.items():
        made = checkpoint.tensors[parameter]
        assert made.dtype == "F32"  # the whole product, which 16 bits would round
        np.testing.assert_array_equal(np.concatenate(list(made.pieces())), expected)
    assert any("float8 are dequantized" in note for note in checkpoint.notes)
    assert any("activations are not rounded" in note for note in checkpoint.notes)


def test_one_scale_where_the_config_has_blocks_is_refused(tmp_path):
    packers.write_float8(tmp_path, FLOAT8["blocks"][0], "weight_scale_inv", (0, 0), "float32")
    with pytest.raises(CheckpointError, match=r"has weight_scale_inv \[\], but blocks of 16 x 32 need \["):
        read_checkpoint(tmp_path)


def test_float8_blocks_are_dequantized_as_by_transformers(tmp_path):
    from safetensors.torch import load_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weights = packers.write_float8(tmp_path, *FLOAT8["blocks"])
    stored, checkpoint = load_file(tmp_path / "model.safetensors"), read_checkpoint(tmp_path)
    for parameter in weights:
        pair = {"weight": stored[parameter], "weight_scale_inv": stored[f"{parameter}_scale_inv"]}
        [expected] = Fp8Dequantize(None).convert(pair).values()
        found = np.concatenate(list(checkpoint.tensors[parameter].pieces()))
        np.testing.assert_array_equal(found, expected.float().numpy())


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("stacked", [True, False])
def test_experts_in_float8_are_dequantized_as_by_transformers(tmp_path, scale_fmt, stacked):
    floats = packers.write_float8_experts(tmp_path, scale_fmt, stacked=stacked)
    tensors = read_checkpoint(tmp_path).tensors
    for own, expected in floats.items():
        made = tensors[f"{own.replace('.mlp.', '.')}.weight"]
        found = np.concatenate([piece.reshape(-1, expected.shape[2]) for piece in made.pieces()])
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_a_stack_in_float8_without_fitting_scales_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    packers.write_float8_experts(tmp_path, "float", stacked=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    for wrong, words in (
        (None, "needs .*down_proj_scale.* which is missing"),
        (tensors[f"{name}_scale_inv"][:2], r"needs .*\[4, rows, columns\], which is F32 \[2, "),
        (tensors[f"{name}_scale_inv"][:, :3], "has 3 scales for 64 values, expected blocks of 16"),
    ):
        changed = {key: it for key, it in tensors.items() if key != f"{name}_scale_inv" or wrong is not None}
        changed |= {} if wrong is None else {f"{name}_scale_inv": wrong.contiguous()}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            read_checkpoint(tmp_path)


WRITTEN = {
    "AwqConfig": {"bits": 4, "group_size": 32},
    "GPTQConfig": {"bits": 4, "group_size": 32},
    "FineGrainedFP8Config": {},
    "Mxfp4Config": {},
}
# As GPTQModel writes one.
GPTQMODEL = {
    "bits": 4,
    "dynamic": {"-:.*gate.*": {}},
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "quant_method": "awq",
    "checkpoint_format": "gemm",
    "format": "gemm",
    "pack_dtype": "int32",
    "zero_point": True,
    "version": "gemm",
    "meta": {"quantizer": ["gptqmodel:5.7.0"], "failsafe": None, "gc_mode": "interval", "vram_strategy": "exclusive"},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_key_that_transformers_writes_is_known(name):
    import transformers

    written = getattr(transformers, name)(**WRITTEN[name]).to_dict()
    found = read_quantization(Keys({"quantization_config": json.loads(json.dumps(written))}, "config.json"))
    assert found is not None and found.block == ((128, 128) if "FP8" in name else (0, 0))


@pytest.mark.parametrize("config", [GPTQMODEL, {**GPTQMODEL, "quant_method": "gptq", "format": "gptq"}])
def test_every_key_that_gptqmodel_writes_is_known(config):
    if config["quant_method"] == "gptq":
        config = {key: it for key, it in config.items() if key not in ("zero_point", "version")}
        config |= {"checkpoint_format": "gptq", "sym": True}
    found = read_quantization(Keys({"quantization_config": config}, "config.json"))
    assert found is not None and found.method == config["quant_method"] and found.grids[0].group == 128


COMPRESSED = packers.SCHEMES["packed-int4-bf16"].config


def with_group(**changes):
    group = COMPRESSED["config_groups"]["group_0"]
    return {**COMPRESSED, "config_groups": {"group_0": {**group, **changes}}}


@pytest.mark.threat("packed-tensors")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, ["quant_method is missing", "awq, gptq, compressed-tensors, fp8"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method='bitsandbytes' is unsupported"]),
        ({**packers.AWQ, "version": "gemv"}, ["version='gemv'", "gemm"]),
        ({**packers.AWQ, "bits": 8}, ["bits=8", "expected 4"]),
        ({**GPTQMODEL, "checkpoint_format": "gemv"}, ["checkpoint_format='gemv'", "gemm"]),
        ({**GPTQMODEL, "pack_dtype": "int16"}, ["pack_dtype='int16'", "int32"]),
        ({**GPTQMODEL, "dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic=", "begin with -:"]),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, ["expert_dtype='fp4'", "fp8"]),
        ({**packers.GPTQ, "bits": 3}, ["bits=3", "expected 4 or 8"]),
        ({**packers.GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format='marlin'", "gptq, gptq_v2"]),
        ({**packers.GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic=", "begin with -:"]),
        ({**packers.GPTQ, "group_size": "128"}, ["group_size='128'", "a whole number"]),
        ({**packers.GPTQ, "rotation": "hadamard"}, ["rotation='hadamard' is not known"]),
        ({**COMPRESSED, "format": "marlin-24"}, ["format='marlin-24'"]),
        ({**packers.MODELOPT, "quant_algo": "NVFP4_AWQ"}, ["quant_algo='NVFP4_AWQ'"]),
        ({**packers.MODELOPT, "quantized_layers": {"x": {"quant_algo": "W4A8_AWQ"}}}, ["quantized_layers='W4A8_AWQ'"]),
        ({**COMPRESSED, "ignore": "lm_head"}, ["ignore='lm_head'", "a list of names"]),
        ({**COMPRESSED, "config_groups": {"W4A16": ["Linear"]}}, ["W4A16=['Linear']", "an object"]),
        (with_group(weights={"num_bits": 2}), ["num_bits=2", "4 or 8"]),
        (with_group(weights={"num_bits": 4, "strategy": "tensor_group"}), ["strategy='tensor_group'"]),
        (with_group(weights={"num_bits": 6, "type": "float"}), ["num_bits=6", "expected 4 or 8"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size=[128]", "two numbers"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt='e5m2'"]),
    ],
    ids=str,
)
def test_what_a_config_says_of_codes_is_read_or_refused_by_name(config, words):
    with pytest.raises(CheckpointError) as caught:
        read_quantization(Keys({"quantization_config": config}, "config.json"))
    for word in ["config.json", *words]:
        assert word in str(caught.value)
