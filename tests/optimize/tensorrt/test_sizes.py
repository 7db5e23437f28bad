"""Engines keep quantized weights quantized, and one that does not is refused by name."""

import numpy as np
import onnx
import pytest
from doubles.engines import spec_of
from onnx import StringStringEntryProto, TensorProto, helper

from llmc.errors import BuildError
from llmc.optimize.tensorrt import sizes
from llmc.optimize.tensorrt.builder import build_engine
from llmc.optimize.tensorrt.sizes import FIXED_BYTES, MOST_EXPANDED, check_size

# Enough weights that the engine's fixed parts, 50 KB here, count little.
INPUTS, OUTPUTS, BLOCK = 2048, 8192, 128
# Engine bytes over bytes of weights. TensorRT-RTX 1.7.1 had 1.001 in fp16, 1.003 in int8 and, with the scales, 1.05 in
# int4; expanded weights have 2 and 4.
LARGEST_RATIO = 1.2
KINDS = {"fp16": (TensorProto.FLOAT16, 16), "int8": (TensorProto.INT8, 8), "int4": (TensorProto.INT4, 4)}
PROFILES = [{"batch": (1, 1, 4), "sequence": (1, 1, 1)}, {"batch": (1, 1, 1), "sequence": (1, 128, 128)}]


def product(kind: str, inputs: int = INPUTS, outputs: int = OUTPUTS) -> onnx.ModelProto:
    """A product with weights [inputs, outputs] that a file beside it holds."""
    data_type, bits = KINDS[kind]
    size = inputs * outputs * bits // 8
    weights = TensorProto(name="w", data_type=data_type, dims=(inputs, outputs), data_location=TensorProto.EXTERNAL)
    where = {"location": "weights.bin", "offset": "0", "length": str(size)}
    weights.external_data.extend(StringStringEntryProto(key=key, value=value) for key, value in where.items())
    nodes, initializers = [], [weights]
    if bits < 16:
        rows = inputs // BLOCK if kind == "int4" else 0
        scales = np.full((rows, outputs) if rows else outputs, 2.0**-6, np.float16)
        initializers.append(onnx.numpy_helper.from_array(scales, "scales"))
        blocks = {"axis": 0, "block_size": BLOCK} if rows else {"axis": 1}
        nodes.append(helper.make_node("DequantizeLinear", ["w", "scales"], ["wide"], "dequantized", **blocks))
    nodes.append(helper.make_node("MatMul", ["x", "wide" if nodes else "w"], ["y"], "product"))
    shapes = (("x", inputs), ("y", outputs))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["batch", "sequence", size]) for n, size in shapes)
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


@pytest.mark.parametrize("kind", KINDS)
def test_real_engines_keep_the_bytes_of_their_weights(rtx, tmp_path, config, kind):
    model, path = product(kind), tmp_path / "decoder.onnx"
    path.write_bytes(model.SerializeToString())
    size = INPUTS * OUTPUTS * KINDS[kind][1] // 8
    np.random.default_rng(0).integers(0, 60, size, np.uint8).tofile(tmp_path / "weights.bin")
    build_engine(spec_of(rtx, config), path, tmp_path / "engine.plan", PROFILES)
    assert (tmp_path / "engine.plan").stat().st_size < LARGEST_RATIO * size


def test_an_engine_beyond_the_limit_is_not_written(rtx, tmp_path, config, monkeypatch):
    """Planted: its fixed parts are counted as weights, so they seem to be expanded."""
    monkeypatch.setattr(sizes, "FIXED_BYTES", 0)
    path = tmp_path / "decoder.onnx"
    path.write_bytes(product("int8", 64, 64).SerializeToString())
    np.ones(64 * 64, np.int8).tofile(tmp_path / "weights.bin")
    with pytest.raises(BuildError, match=r"for 0 MB of weights, of which 0 MB are int8: the library expanded them"):
        build_engine(spec_of(rtx, config), path, tmp_path / "engine.plan", PROFILES)
    assert not [file for file in tmp_path.iterdir() if "engine" in file.name]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("int8", "of which 17 MB are int8: .*; use --int4 or --fp16$"), ("int4", "8 MB are int4: .*; use --fp16$")],
)
def test_expanded_weights_are_refused_with_what_to_use(kind, words):
    graph = product(kind).graph
    held = INPUTS * OUTPUTS * KINDS[kind][1] // 8
    others = len(graph.initializer[1].raw_data)
    most = int(others + MOST_EXPANDED * held + FIXED_BYTES)
    check_size(most, graph)
    with pytest.raises(BuildError, match=words):
        check_size(most + 1, graph)


def test_floats_may_take_any_room(config):
    check_size(1 << 40, product("fp16").graph)
