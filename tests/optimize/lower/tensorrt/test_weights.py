"""Weights as TensorRT takes them: scales above zero, blocks that divide, integers that come back from the file."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import BuildError
from llmc.optimize.lower.context import Computed, WeightOnly, quant_configs
from llmc.optimize.lower.tensorrt.weights import SMALLEST_SCALE, as_stored, fit_grid, narrow_values, round_scales
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid, Quantized
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.file import WeightFile

HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
GRIDS = [Grid(8, positive=True), Grid(4, 32, positive=True), Grid(4, 128, positive=True)]
# How much larger the mean square error of the weights may become where scales are rounded to the stored type: float16
# has 11 bits for them, bfloat16 8, which costs 8-bit integers a twentieth.
INCREASE = {"float32": 1.0, "float16": 1.002, "bfloat16": 1.06}


def weights(rows: int = 64, inputs: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_t(6, (rows, inputs)).astype(np.float32)


def dequantized(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values * np.repeat(scales.astype(np.float32), values.shape[1] // scales.shape[1], axis=1)


def increase(wanted: np.ndarray, found: Quantized, values: np.ndarray, scales: np.ndarray) -> float:
    """Mean square error of the weights as they are stored over that of the weights as they were chosen."""
    stored = np.square(dequantized(values, scales) - wanted).mean()
    return float(stored / np.square(found.dequantize() - wanted).mean())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), HALF, BRAIN], ids=str)
def test_what_is_stored_is_what_was_chosen_but_for_the_type_of_scales(grid, dtype):
    wanted = weights()
    found = rtn.quantize(wanted, grid)
    values, scales = as_stored(found, dtype)
    assert values.dtype == np.int8 and scales.dtype == dtype
    assert (scales > 0).all() and values.min() >= grid.low and values.max() <= grid.high
    assert increase(wanted, found, values, scales) <= INCREASE[dtype.name]
    if dtype != BRAIN:
        np.testing.assert_array_equal(values, found.values)


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_scales_of_too_few_bits_exceed_the_increase(dtype):
    wanted = weights()
    found = rtn.quantize(wanted, GRIDS[0])
    lost = {HALF: 2.0**-9, BRAIN: 2.0**-6}[dtype]
    values, scales = as_stored(found, dtype)
    assert increase(wanted, found, values, scales.astype(np.float32) * (1 + lost)) > INCREASE[dtype.name]


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_above_zero_is_refused_as_the_checkpoints(scale):
    found = Quantized(np.array([[-8, 7, 3, -1]], np.int8), np.array([[scale]], np.float32), Grid(4, 4))
    with pytest.raises(BuildError, match="only scales above zero, and integers that the checkpoint stores have others"):
        as_stored(found, HALF)


@pytest.mark.parametrize("magnitude", [2.0**-12, 2.0**-18, 2.0**-24, 2.0**-60])
def test_weights_so_small_that_float16_holds_their_scale_only_roughly_are_rounded_anew(magnitude):
    wanted = weights() * np.float32(magnitude)
    values, scales = as_stored(rtn.quantize(wanted, GRIDS[0]), HALF)
    error = np.abs(dequantized(values, scales) - wanted).max()
    assert error <= max(1.5 * float(scales.astype(np.float32).max()), SMALLEST_SCALE)


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx", "cpu", "cuda"])
@pytest.mark.parametrize("request_", [{}, {"precision": "int4"}, {"precision": "int4", "head": "int8"}], ids=str)
def test_recipes_for_tensorrt_and_no_others_ask_for_scales_above_zero(manifest, target, request_):
    recipe, _ = resolve(Request(**request_), capabilities(target), 1024, "mine")
    for stored in quant_configs(recipe, manifest.geometry).values():
        integers = [it for it in (stored.body, stored.head) if isinstance(it, WeightOnly)]
        assert len(integers) == (1 if recipe.head == "fp16" else 2)
        assert {it.grid.positive for it in integers} == {target.startswith("tensorrt")}


def test_a_scale_beyond_float16_is_refused():
    with pytest.raises(BuildError, match="is beyond float16; build with --fp32"):
        round_scales(np.array([1e6], np.float32), HALF)


def test_weights_beyond_float16_are_refused_by_name():
    assert narrow_values(np.array([65504.0], np.float32), "float16", "x") == 65504
    assert np.isfinite(narrow_values(np.array([1e6], np.float32), "bfloat16", "x").astype(np.float32)).all()
    with pytest.raises(BuildError, match=r"model.norm.weight holds weights beyond float16's range"):
        narrow_values(np.array([1e6], np.float32), "float16", "model.norm.weight")


@pytest.mark.parametrize(
    ("block", "inputs", "found"),
    [(128, 896, 128), (128, 64, 64), (256, 384, 128), (128, 96, 32), (0, 7, 0), (64, 96, 32)],
)
def test_a_block_is_the_largest_that_divides_the_inputs(block, inputs, found):
    assert fit_grid(Grid(4, block, positive=True), inputs, "x") == Grid(4, found, positive=True)


def test_inputs_that_no_block_divides_are_refused_by_name():
    with pytest.raises(BuildError, match=r"mlp.down_proj: none of 128, 64 and 32 divides its 80 inputs"):
        fit_grid(Grid(4, 128), 80, "mlp.down_proj")


def test_an_odd_number_of_int4_outputs_is_refused(exported, lowering):
    lowered = lowering(exported("llama-biases").export, WeightOnly(Grid(4, 32, positive=True))).before("lower linears")
    head = lowered.node("lm_head").inputs[1]
    tensor = head.const_value
    head.const_value = ir.ExternalTensor(
        tensor.location, tensor.offset, 95 * 64 * 4, tensor.dtype, shape=ir.Shape([95, 64]), name=tensor.name,
        base_dir=tensor.base_dir,
    )  # fmt: skip
    with pytest.raises(BuildError, match="lm_head: TensorRT packs int4 weights in pairs of outputs, and there are 95"):
        lowered.apply("lower linears")


@pytest.mark.parametrize(
    "weights", [Computed(), WeightOnly(Grid(8, positive=True)), WeightOnly(Grid(4, 32, positive=True))], ids=str
)
def test_weights_are_written_once_and_come_back_from_the_file(exported, lowering, weights):
    lowered = lowering(exported("llama-biases").export, weights, compute="float16").finish()
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
