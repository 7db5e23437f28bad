"""Integers are laid out as ONNX Runtime's kernels read them, and come back as they were."""

import numpy as np
import onnx
import pytest

from llmc.bundle.model.linear import Codes
from llmc.optimize.quantize.grid import Grid, Quantized, pack_blocks, pack_rows, unpack_rows

# MatMulNBits sums up to 300 products in float32 in an order of its own; by bits, as 8 give integers 16 times as large.
SUM_TOLERANCE = {4: 1e-5, 8: 2e-4}

GRIDS = [Grid(bits, block) for bits in (4, 8) for block in (32, 64, 128, 256)]
ASYMMETRIC = [Grid(grid.bits, grid.block, symmetric=False) for grid in GRIDS]
# Narrower than a block, several blocks, a short last block, an odd number of inputs.
SHAPES = [(1, 1), (3, 31), (5, 33), (2, 128), (7, 257), (4, 300)]


def integers(grid: Grid, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(grid.low, grid.high + 1, shape).astype(np.int8)


def quantized(grid: Grid, shape: tuple[int, int]) -> Quantized:
    """Any integers and zero points, and scales of both signs, one of them 0."""
    groups = (shape[0], grid.groups(shape[1]))
    scales = np.random.default_rng(1).normal(0, 0.01, groups).astype(np.float32)
    scales[0, 0] = 0
    return Quantized(integers(grid, shape), scales, grid, None if grid.symmetric else integers(grid, groups, seed=2))


def meaning(q: Quantized, n: int, k: int) -> np.float32:
    """What one integer stands for."""
    group = k // q.grid.width(q.values.shape[1])
    zero = 0 if q.zero_points is None else int(q.zero_points[n, group])
    return np.float32(int(q.values[n, k]) - zero) * q.scales[n, group]


@pytest.mark.parametrize("grid", [*GRIDS, *ASYMMETRIC, Grid(8), Grid(4), Grid(8, 0, False), Grid(4, 0, False)], ids=str)
def test_dequantize_takes_scale_and_zero_point_of_each_integers_group(grid):
    for shape in SHAPES:
        q = quantized(grid, shape)
        wanted = [[meaning(q, n, k) for k in range(shape[1])] for n in range(shape[0])]
        assert q.dequantize().dtype == np.float32
        np.testing.assert_array_equal(q.dequantize(), np.array(wanted, np.float32))


def one_node(op_type: str, feeds: dict[str, np.ndarray], constants, open_session, **attributes) -> np.ndarray:
    """Run a single operator of ONNX Runtime's on ``feeds`` and ``constants``, in order."""
    helper = onnx.helper
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = helper.make_node(op_type, [*feeds, *constants], ["y"], domain="com.microsoft", **attributes)
    held = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "one_node", inputs, [output], held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return open_session(model.SerializeToString()).run(None, feeds)[0]


def product(q: Quantized, packed: np.ndarray, x: np.ndarray, session, accuracy_level: int) -> np.ndarray:
    """x @ W.T by MatMulNBits, in float arithmetic (level 0) or in integers, with x as int8 in blocks (level 4)."""
    rows, inputs = q.values.shape
    sizes = {"K": inputs, "N": rows, "bits": q.grid.bits, "block_size": q.grid.block, "accuracy_level": accuracy_level}
    constants = {"packed": packed, "scales": q.scales}
    if q.zero_points is not None:
        constants["zeros"] = pack_rows(q.zero_points, q.grid)
    return one_node("MatMulNBits", {"x": x}, constants, session, **sizes)


def activations(q: Quantized) -> np.ndarray:
    """Inputs [2, K] that blocks of int8 hold exactly: integers of up to 127 over 64, with a 127 in each block."""
    x = np.random.default_rng(2).integers(-127, 128, (2, q.values.shape[1])).astype(np.float32)
    x[:, :: q.grid.block] = 127
    return x / 64


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("grid", [*GRIDS, *ASYMMETRIC], ids=str)
def test_matmulnbits_multiplies_by_what_the_integers_stand_for(session, grid, level):
    for shape in SHAPES:
        q = quantized(grid, shape)
        x = activations(q)
        found = product(q, pack_blocks(q.values, grid), x, session, level)
        np.testing.assert_allclose(found, x @ q.dequantize().T, atol=SUM_TOLERANCE[grid.bits], rtol=0)


@pytest.mark.parametrize("grid", [*GRIDS, *ASYMMETRIC], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 31], ids=str)
def test_gatherblockquantized_reads_what_the_integers_stand_for(session, grid, shape):
    q = quantized(grid, shape)
    rows = np.array([shape[0] - 1, 0, 1], np.int64)
    # Rows are flat: zero points of 4 bits, two to a byte, are taken in that form only.
    flat = pack_blocks(q.values, grid).reshape(shape[0], -1)
    constants = {"scales": q.scales}
    if q.zero_points is not None:
        constants["zeros"] = pack_rows(q.zero_points, grid)
    options = {"bits": grid.bits, "block_size": grid.block, "gather_axis": 0, "quantize_axis": 1}
    got = one_node("GatherBlockQuantized", {"packed": flat, "rows": rows} | constants, {}, session, **options)
    np.testing.assert_array_equal(got[:, : shape[1]], q.dequantize()[rows])


@pytest.mark.parametrize(("bits", "width"), [(4, 4), (8, 7)])
def test_packed_rows_are_unpacked_again(bits, width):
    grid, values = (
        Grid(bits),
        np.random.default_rng(3).integers(-(1 << bits - 1), 1 << bits - 1, (5, 7)).astype(np.int8),
    )
    values[0, :2] = grid.low, grid.high
    packed = pack_rows(values, grid)
    assert packed.shape == (5, width)
    np.testing.assert_array_equal(unpack_rows(packed, grid, 7), values)


@pytest.mark.parametrize(
    ("codes", "held"),
    [
        (Codes(4, 64, zero_points=True), True),
        (Codes(4, 128, zero_points=True), True),
        (Codes(4, 256, zero_points=True), True),
        (Codes(4, 32, zero_points=True), False),
        (Codes(8, 64, zero_points=True), False),
        (Codes(4, 64, zero_points=False), False),
        (Codes(4, 64, zero_points=False, offsets=True), False),
        (Codes(4, 64, zero_points=True, kind="mxfp4"), False),
        (Codes(2, 64, zero_points=True), True),
    ],
)
def test_a_grid_holds_integers_of_its_kind_in_blocks_of_its_own_or_wider(codes, held):
    assert Grid(4, 64, symmetric=False).holds(codes, 256) is held


def nibbles_exchanged(packed: np.ndarray) -> np.ndarray:
    return packed >> 4 | packed << 4


def off_by_one(packed: np.ndarray) -> np.ndarray:
    return packed + np.uint8(1)


def blocks_exchanged(packed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(packed[:, ::-1])


@pytest.mark.parametrize("plant", [nibbles_exchanged, off_by_one, blocks_exchanged])
@pytest.mark.parametrize("level", [0, 4])
def test_a_planted_error_exceeds_the_sum_tolerance(session, plant, level):
    grid, shape = Grid(4, 32), (3, 64)
    q = quantized(grid, shape)
    x = activations(q)
    got = product(q, plant(pack_blocks(q.values, grid)), x, session, level)
    assert np.abs(got - x @ q.dequantize().T).max() > SUM_TOLERANCE[grid.bits]


@pytest.mark.parametrize("plant", [nibbles_exchanged, off_by_one])
@pytest.mark.parametrize("level", [0, 4])
def test_a_planted_error_in_zero_points_exceeds_the_sum_tolerance(session, plant, level, monkeypatch):
    grid, shape = Grid(4, 32, symmetric=False), (3, 64)
    q = quantized(grid, shape)
    x = activations(q)
    planted = plant(pack_rows(q.zero_points, grid))
    monkeypatch.setitem(product.__globals__, "pack_rows", lambda *_: planted)
    got = product(q, pack_blocks(q.values, grid), x, session, level)
    assert np.abs(got - x @ q.dequantize().T).max() > SUM_TOLERANCE[grid.bits]
