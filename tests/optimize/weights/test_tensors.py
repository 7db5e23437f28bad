"""Weights are read by rows in any precision, refused when broken, and written once, page by page."""

from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import CheckpointError
from llmc.optimize.weights import tensors as weights
from llmc.optimize.weights.file import ALIGNMENT, WeightFile, round_to_bfloat16
from llmc.optimize.weights.tensors import pieces, rows_of

DTYPES = {
    "float32": (ir.DataType.FLOAT, np.float32),
    "float16": (ir.DataType.FLOAT16, np.float16),
    "bfloat16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}
HEADER = 24  # bytes before the tensor in its file


def stored(folder: Path, array: np.ndarray, dtype: ir.DataType) -> ir.ExternalTensor:
    """An array in a file, behind a header and in front of other bytes."""
    (folder / "shard").write_bytes(b"h" * HEADER + array.tobytes() + b"t" * 10)
    return ir.ExternalTensor(
        "shard", HEADER, array.nbytes, dtype, shape=ir.Shape(array.shape), name="layer.weight", base_dir=folder
    )


def matrix(rows: int = 7, inputs: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (rows, inputs)).astype(np.float32)


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(("dtype", "numpy_dtype"), DTYPES.values(), ids=DTYPES)
def test_rows_are_the_exact_values_as_float32(tmp_path, dtype, numpy_dtype):
    array = matrix().astype(numpy_dtype)
    tensor = stored(tmp_path, array, dtype)
    for span in [(), (0, 7), (2, 5), (6, 7), (6, 100), (3, 3)]:
        rows = rows_of(tensor, *span)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, array.astype(np.float32)[slice(*span) if span else slice(None)])


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "numpy_dtype"), DTYPES.values(), ids=DTYPES)
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path, dtype, numpy_dtype, broken):
    array = matrix()
    array[4, 2] = broken
    tensor = stored(tmp_path, array.astype(numpy_dtype), dtype)
    with pytest.raises(
        CheckpointError, match=r"shard: layer\.weight holds NaN or infinite weights between rows 3 and 6"
    ):
        rows_of(tensor, 3, 6)
    assert np.isfinite(rows_of(tensor, 0, 4)).all()


def test_a_file_that_ends_early_is_refused_by_name(tmp_path):
    tensor = stored(tmp_path, matrix(), ir.DataType.FLOAT)
    with (tmp_path / "shard").open("r+b") as file:
        file.truncate(HEADER + 7 * 5 * 4 - 1)
    with pytest.raises(
        CheckpointError, match=r"shard: ends inside layer\.weight; the file is truncated, copy it again"
    ):
        rows_of(tensor)
    assert rows_of(tensor, 0, 6).shape == (6, 5)


# --------------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("shape", [(1, 1), (1000, 1000), (3, 1 << 20), (70_001, 16), (5,), (1 << 19,)], ids=str)
def test_pieces_cover_every_row_once_and_stay_small(shape):
    spans = list(pieces(shape))
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(shape[0]))
    width = shape[1] if len(shape) > 1 else 1
    assert all((stop - start) * width <= max(weights.PIECE, width) for start, stop in spans)


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.fixture
def file(tmp_path):
    """A weight file in an empty folder."""
    with closing(WeightFile(tmp_path)) as opened:
        yield opened


def written(tensor: ir.ExternalTensor) -> bytes:
    content = (Path(tensor.base_dir) / tensor.location).read_bytes()
    return content[tensor.offset : tensor.offset + tensor.length]


def test_every_tensor_begins_on_a_page(file):
    arrays = [np.arange(n, dtype=np.float32) for n in (1, 1024, 1025, 7)]
    tensors = [file.add([f"t{n}"], lambda array=array: [array])[0] for n, array in enumerate(arrays)]
    file.close()
    assert [tensor.offset for tensor in tensors] == [0, 4096, 8192, 16384]
    assert [tensor.offset % ALIGNMENT for tensor in tensors] == [0] * 4
    for tensor, array in zip(tensors, arrays, strict=True):
        assert written(tensor) == array.tobytes()
        np.testing.assert_array_equal(tensor.numpy(), array)


# ------------------------------------------------------------------------------------------------------------ rounding


def rounded(file, *arrays: np.ndarray, twice: bool = False) -> list[np.ndarray]:
    """Arrays as a graph's weights, rounded in their file."""
    tensors = [file.add([f"w{n}"], lambda array=array: [array])[0] for n, array in enumerate(arrays)]
    file.close()
    values = [ir.Value(name=tensor.name, const_value=tensor) for tensor in tensors]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 24}, name="weights")
    ir.save(ir.Model(graph, ir_version=11), file.folder / "decode.onnx")
    for _ in range(1 + twice):
        round_to_bfloat16(file.folder)
    model = ir.load(file.folder / "decode.onnx")
    return [np.array(value.const_value.numpy()) for value in model.graph.initializers.values()]


@pytest.mark.parametrize("twice", [False, True])
def test_weights_are_rounded_to_bfloat16_as_torch_does(file, twice):
    torch = pytest.importorskip("torch")
    info = ml_dtypes.finfo(ml_dtypes.bfloat16)
    generator = np.random.default_rng(3)
    wide = (generator.normal(0, 1, 5000) * 10.0 ** generator.uniform(-40, 38, 5000)).astype(np.float32)
    edges = np.array([0.0, -0.0, 1e-45, -1e-45, info.max, info.min, info.smallest_subnormal], np.float32)
    for got, array in zip(rounded(file, wide, edges, twice=twice), (wide, edges), strict=True):
        wanted = torch.from_numpy(array).bfloat16().float().numpy()
        assert got.tobytes() == wanted.tobytes(), "to the bit, so of zeros the signs too"


def test_only_weights_in_float32_are_rounded(file):
    arrays = [np.arange(7, dtype=np.uint8), np.full(3, 1.001, np.float16), np.full(3, 1.001, np.float32)]
    bytes_, halves, floats = rounded(file, *arrays)
    np.testing.assert_array_equal(bytes_, arrays[0])
    np.testing.assert_array_equal(halves, arrays[1])
    np.testing.assert_array_equal(floats, 1.0)
