"""Weights are written once, page by page, and rounded in their file."""

from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmc.optimize.weights.file import ALIGNMENT, WeightFile, round_to_bfloat16


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
