"""Weights are read by rows in any precision, and refused when broken."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from llmc.errors import CheckpointError
from llmc.exported import PIECE, pieces, read_weights, rows_of

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


def test_a_length_that_is_not_the_shapes_is_refused_by_name(tiny_export, tmp_path):
    graph = onnx.load(tiny_export / "decoder.onnx", load_external_data=False)
    weight = next(it for it in graph.graph.initializer if it.external_data)
    length = next(entry for entry in weight.external_data if entry.key == "length")
    length.value = str(int(length.value) - 4)
    onnx.save(graph, tmp_path / "decoder.onnx")
    for file in tiny_export.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=rf"gives {weight.name} {length.value} bytes, expected .* for its shape"):
        read_weights(tmp_path)


@pytest.mark.parametrize("shape", [(1, 1), (1000, 1000), (3, 1 << 20), (70_001, 16), (5,), (1 << 19,)], ids=str)
def test_pieces_cover_every_row_once_and_stay_small(shape):
    spans = list(pieces(shape))
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(shape[0]))
    width = shape[1] if len(shape) > 1 else 1
    assert all((stop - start) * width <= max(PIECE, width) for start, stop in spans)
