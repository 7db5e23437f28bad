"""Tensors of quantized linears that do not fit together are refused in a sentence that names the linear."""

import numpy as np
import pytest
from doubles import packers

from llmc.errors import CheckpointError
from llmc.export.keys import Keys
from llmc.export.sources.codes import QuantizedTensor
from llmc.export.sources.packing import unpack_weights
from llmc.export.sources.quantization import read_quantization
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


def test_codes_that_lie_in_the_file_as_they_are_needed_are_not_copied(tmp_path):
    found = read(tmp_path, "int8-channel", parts("int8-channel"))[f"{P}.weight"]
    assert isinstance(found, QuantizedTensor)
    assert (found.codes.file, found.codes.dtype, found.zero_points) == ("model.safetensors", "I8", None)
