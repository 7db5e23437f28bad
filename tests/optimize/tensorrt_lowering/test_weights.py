"""Weights as TensorRT takes them: scales above zero, blocks that divide, integers that come back from the file."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import BuildError
from llmc.optimize.lower.plan import Computed, Float8, WeightOnly
from llmc.optimize.lower.tensorrt.weights import (
    SMALLEST_SCALE,
    fitted,
    narrowed,
    stored_scales,
    with_positive_scales,
)
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid, Quantized
from llmc.optimize.weights import WeightFile

HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
GRIDS = [Grid(8), Grid(4, 32), Grid(4, 128)]
# How much larger the mean square error of the weights may become. A scale of either sign reaches one step further than
# one above zero: 4 bits lose a seventh to a quarter by that, 8 bits a fiftieth, in bfloat16 a twentieth. Wrong signs
# cost a factor of ten and more.
INCREASE = {8: 1.07, 4: 1.3}


def weights(rows: int = 64, inputs: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_t(6, (rows, inputs)).astype(np.float32)


def dequantized(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values * np.repeat(scales.astype(np.float32), values.shape[1] // scales.shape[1], axis=1)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), HALF, BRAIN], ids=str)
def test_scales_become_positive_and_the_matrix_stays_nearly_the_same(grid, dtype):
    wanted = weights()
    found = rtn.quantize(wanted, grid)
    assert (found.scales < 0).any() and (found.values == grid.low).any()
    values, scales = with_positive_scales(found, dtype)
    assert values.dtype == np.int8 and scales.dtype == dtype
    assert (scales > 0).all() and values.min() >= grid.low and values.max() <= grid.high
    before = np.square(found.dequantize() - wanted).mean()
    assert np.square(dequantized(values, scales) - wanted).mean() <= INCREASE[grid.bits] * before


def test_wrong_signs_exceed_the_increase():
    wanted, grid = weights(), GRIDS[1]
    found = rtn.quantize(wanted, grid)
    unturned = dequantized(found.values, np.abs(found.scales))
    assert np.square(unturned - wanted).mean() > INCREASE[4] * np.square(found.dequantize() - wanted).mean()


def test_groups_with_positive_scales_are_left_as_they_are():
    values = np.array([[-8, 7, 3, -1]], np.int8)
    found = Quantized(values, np.array([[0.5]], np.float32), Grid(4, 4))
    kept, scales = with_positive_scales(found, HALF)
    np.testing.assert_array_equal(kept, values)
    assert scales.tolist() == [[0.5]]


def test_a_negative_scale_without_the_lowest_integer_only_changes_signs():
    found = Quantized(np.array([[-7, 5, 0, 1]], np.int8), np.array([[-0.25]], np.float32), Grid(4, 4))
    values, scales = with_positive_scales(found, HALF)
    assert values.tolist() == [[7, -5, 0, -1]] and scales.tolist() == [[0.25]]


def test_a_group_of_zeros_has_a_scale_above_zero():
    found = rtn.quantize(np.zeros((2, 32), np.float32), Grid(4, 32))
    values, scales = with_positive_scales(found, HALF)
    assert not values.any() and (scales > 0).all()


@pytest.mark.parametrize("magnitude", [2.0**-12, 2.0**-18, 2.0**-24, 2.0**-60])
def test_weights_so_small_that_float16_holds_their_scale_only_roughly_are_rounded_anew(magnitude):
    wanted = weights() * np.float32(magnitude)
    values, scales = with_positive_scales(rtn.quantize(wanted, Grid(8)), HALF)
    error = np.abs(dequantized(values, scales) - wanted).max()
    assert error <= max(1.5 * float(scales.astype(np.float32).max()), SMALLEST_SCALE)


def test_a_scale_beyond_float16_is_refused():
    with pytest.raises(BuildError, match="is beyond float16; build with --precision fp32"):
        stored_scales(np.array([1e6], np.float32), HALF)


def test_weights_beyond_float16_are_refused_by_name():
    assert narrowed(np.array([65504.0], np.float32), "float16", "x") == 65504
    assert np.isfinite(narrowed(np.array([1e6], np.float32), "bfloat16", "x").astype(np.float32)).all()
    with pytest.raises(BuildError, match=r"model.norm.weight holds weights beyond float16's range"):
        narrowed(np.array([1e6], np.float32), "float16", "model.norm.weight")


@pytest.mark.parametrize(
    ("block", "inputs", "found"),
    [(128, 896, 128), (128, 64, 64), (256, 384, 128), (128, 96, 32), (0, 7, 0), (64, 96, 32)],
)
def test_a_block_is_the_largest_that_divides_the_inputs(block, inputs, found):
    assert fitted(Grid(4, block), inputs, "x").block == found


def test_inputs_that_no_block_divides_are_refused_by_name():
    with pytest.raises(BuildError, match=r"mlp.down_proj: none of 128, 64 and 32 divides its 80 inputs"):
        fitted(Grid(4, 128), 80, "mlp.down_proj")


def test_an_odd_number_of_int4_outputs_is_refused(exported, form, lowering):
    lowered = lowering(exported("llama-biases").export, form, WeightOnly(Grid(4, 32))).before("lower linears")
    head = lowered.node("lm_head").inputs[1]
    tensor = head.const_value
    head.const_value = ir.ExternalTensor(
        tensor.location, tensor.offset, 95 * 64 * 4, tensor.dtype, shape=ir.Shape([95, 64]), name=tensor.name,
        base_dir=tensor.base_dir,
    )  # fmt: skip
    with pytest.raises(BuildError, match="lm_head: TensorRT packs int4 weights in pairs of outputs, and there are 95"):
        lowered.apply("lower linears")


@pytest.mark.parametrize("weights", [Computed(), Float8(), WeightOnly(Grid(8)), WeightOnly(Grid(4, 32))], ids=str)
def test_weights_are_written_once_and_come_back_from_the_file(exported, form, lowering, weights):
    lowered = lowering(exported("llama-biases").export, form, weights, compute="float16").finish()
    size = (lowered.folder / "weights.bin").stat().st_size
    read = ir.load(lowered.write() / "decoder.onnx").graph.initializers
    for name, value in lowered.graph.initializers.items():
        np.testing.assert_array_equal(read[name].const_value.numpy(), value.const_value.numpy())
    assert (
        max(v.const_value.offset + v.const_value.length for v in read.values() if hasattr(v.const_value, "offset"))
        == size
    )


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_int4_is_stored_in_pairs_low_half_first(tmp_path, count):
    values = (np.arange(count) % 16 - 8).astype(np.int8)
    file = WeightFile(tmp_path)
    [tensor] = file.add(["x"], lambda: [values.astype(ml_dtypes.int4)])
    file.close()
    stored = np.frombuffer((tmp_path / "weights.bin").read_bytes(), np.uint8)
    assert len(stored) == -(-count // 2)
    assert (stored[0] & 15) == 8
    np.testing.assert_array_equal(tensor.numpy().astype(np.int8), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int32])
def test_every_type_is_stored_as_its_bytes(tmp_path, dtype):
    values = np.arange(12).reshape(3, 4).astype(dtype)
    file = WeightFile(tmp_path)
    [tensor] = file.add(["x"], lambda: [values])
    file.close()
    assert (tmp_path / "weights.bin").read_bytes() == values.tobytes()
    np.testing.assert_array_equal(tensor.numpy(), values)
