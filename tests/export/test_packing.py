"""Tensors of quantized linears that do not fit together are refused in a sentence that names the linear."""

import json

import numpy as np
import pytest
import torch
from doubles import packers

from llmc.errors import CheckpointError
from llmc.export.keys import Keys
from llmc.export.sources.codes import QuantizedTensor
from llmc.export.sources.packing import unpack_weights
from llmc.export.sources.quantization import add_modelopt, read_quantization
from llmc.export.sources.safetensors import read_shards

P = "model.layers.0.mlp.up_proj"


def parts(scheme, shape=(48, 64)):
    matrix = packers.random_matrix(np.random.default_rng(0), shape, packers.SCHEMES[scheme].grid)
    return {f"{P}.{part}": array for part, array in packers.SCHEMES[scheme].pack(matrix).items()}


def read(folder, scheme, tensors, **config):
    packers.write_tensors(folder, tensors)
    [shard] = read_shards(folder)
    settings = {"quantization_config": {**packers.SCHEMES[scheme].config, **config}}
    return unpack_weights(folder, shard.tensors, read_quantization(Keys(settings, "config.json")))


def refuses(folder, scheme, change, *words, **config):
    with pytest.raises(CheckpointError) as caught:
        read(folder, scheme, change(parts(scheme)), **config)
    for word in (str(folder), P, *words):
        assert word in str(caught.value)


@pytest.mark.threat("packed-tensors")
@pytest.mark.parametrize("scheme", packers.SCHEMES)
def test_a_missing_part_is_named(scheme, tmp_path):
    needed = [name for name in parts(scheme) if not name.endswith((".g_idx", "weight_g_idx", "_zero_point"))][1:]
    for number, name in enumerate(needed):
        folder = tmp_path / str(number)
        refuses(
            folder,
            scheme,
            lambda found, gone=name: {own: array for own, array in found.items() if own != gone},
            f"its {name.rpartition('.')[2]} is missing",
        )


def with_part(part, array):
    return lambda found: {**found, f"{P}.{part}": array}


ZEROS = np.zeros
BROKEN = {
    "zero points of another shape": ("awq", with_part("qzeros", ZEROS((2, 5), np.int32)), ["qzeros [2, 5]"]),
    "codes of another type": ("awq", with_part("qweight", ZEROS((64, 6), np.float32)), ["qweight", "type F32"]),
    "codes without columns": ("gptq", with_part("qweight", ZEROS((8, 0), np.int32)), ["with rows and columns"]),
    "codes of three dimensions": ("gptq", with_part("qweight", ZEROS((8, 6, 8), np.int32)), ["qweight [8, 6, 8]"]),
    "scales of other rows": ("gptq", with_part("scales", ZEROS((2, 47), np.float16)), ["scales [2, 47]"]),
    "scales that are integers": ("gptq", with_part("scales", ZEROS((2, 48), np.int32)), ["type I32"]),
    "groups that the config does not say": (
        "gptq",
        with_part("scales", ZEROS((4, 48), np.float16)),
        ["4 scales for 64 inputs", "group_size=32"],
    ),
    "no groups": ("gptq", with_part("scales", ZEROS((0, 48), np.float16)), ["0 scales for 64 inputs"]),
    "groups that are not whole": ("awq", with_part("scales", ZEROS((3, 48), np.float16)), ["3 scales for 64 inputs"]),
    "a group that does not exist": (
        "gptq",
        with_part("g_idx", np.full(64, 7, np.int32)),
        ["g_idx", "32 inputs into each of 2 groups"],
    ),
    "a negative group": ("gptq", with_part("g_idx", -np.arange(64, dtype=np.int32)), ["g_idx"]),
    "a zero point that wrapped around": (
        "gptq",
        with_part("qzeros", np.full((2, 6), -1, np.int32)),
        ["a zero point of 16", "gptq_v2"],
    ),
    "a shape that the words do not have": (
        "packed-int4-bf16",
        with_part("weight_shape", np.array([48, 1 << 40])),
        ["no [48, 1099511627776] of 4 bits"],
    ),
    "a negative shape": ("packed-int4-bf16", with_part("weight_shape", np.array([-48, 64])), ["no [-48, 64]"]),
    "a shape of three": ("packed-int4-bf16", with_part("weight_shape", np.ones(3, np.int64)), ["weight_shape [3]"]),
    "the weight in floats as well": ("gptq", with_part("weight", ZEROS((48, 64), np.float32)), ["stored twice"]),
    "another method's codes": (
        "awq",
        with_part("weight_packed", ZEROS((48, 8), np.int32)),
        ["weight_packed, which awq checkpoints"],
    ),
}


@pytest.mark.threat("packed-tensors")
@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_are_refused(case, tmp_path):
    scheme, change, words = BROKEN[case]
    refuses(tmp_path, scheme, change, *words)


def test_a_quantized_linear_that_the_config_calls_ignored_is_refused(tmp_path):
    refuses(tmp_path, "awq", dict, "lists it as unquantized", modules_to_not_convert=[P])


def test_what_stands_beside_a_weight_for_activations_is_left_out(tmp_path):
    found = read(tmp_path, "int8-channel", {**parts("int8-channel"), f"{P}.input_scale": np.ones(1, np.float32)})
    assert list(found) == [f"{P}.weight"]


@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"])
def test_small_floats_of_compressed_tensors_are_what_its_rules_make_of_them(form, tmp_path):
    """NVFP4 stores the inverse of ModelOpt's scale of a matrix; the others powers of two for 32 inputs."""
    rng, bits = np.random.default_rng(0), 8 if "8" in form else 4
    packed, exponents = rng.integers(0, 256, (48, 32), np.uint8), rng.integers(120, 126, (48, 2), np.uint8)
    values = np.array(packers.E2M1, np.float32)[np.stack((packed & 15, packed >> 4), -1).reshape(48, 64)] / 2
    scales, factors = exponents, np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    more, codes = {}, {"weight_packed": packed}
    if form.startswith("nvfp4"):
        scales = torch.from_numpy(rng.uniform(1, 400, (48, 4)).astype(np.float32)).to(torch.float8_e4m3fn)
        factors, more = scales.float().numpy() / np.float32(813), {"weight_global_scale": torch.tensor([813.0])}
    elif bits == 8:
        codes = {"weight": torch.from_numpy(rng.normal(size=(48, 64))).to(torch.float8_e4m3fn)}
        values = codes["weight"].float().numpy()
    config = packers.compressed_config(num_bits=bits, type="float", strategy="tensor_group" if more else "group")
    tensors = {f"{P}.{part}": array for part, array in {**codes, "weight_scale": scales, **more}.items()}
    tensor = read(tmp_path, "packed-int4-bf16", tensors, **{**config, "format": form})[f"{P}.weight"]
    found = np.concatenate(list((tensor if bits == 8 else tensor.codes).pieces())).astype(np.float32)
    found *= 1 if bits == 8 else np.repeat(tensor.scales(), tensor.block, 1)
    np.testing.assert_array_equal(found, values * np.repeat(factors, 64 // factors.shape[1], 1))


def test_a_config_of_modelopt_may_lie_beside_the_checkpoints(tmp_path):
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    stated = {"producer": {"name": "modelopt"}, "quantization": inner}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    keys = Keys(add_modelopt(tmp_path, {"model_type": "qwen3"}), "config.json")
    found = read_quantization(keys)
    assert found is not None and (found.method, found.ignored) == ("modelopt", ("lm_head",))
    for words in ("activations are not rounded", "KV cache is not rounded", "become 8-bit integers, exactly"):
        assert any(words in note for note in keys.notes)


def test_codes_that_lie_in_the_file_as_they_are_needed_are_not_copied(tmp_path):
    found = read(tmp_path, "int8-channel", parts("int8-channel"))[f"{P}.weight"]
    assert isinstance(found, QuantizedTensor)
    assert (found.codes.file, found.codes.dtype, found.zero_points) == ("model.safetensors", "I8", None)
