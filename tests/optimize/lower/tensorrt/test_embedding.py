"""Integers packed in int32 words come back exactly, however an engine divides integers."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from llmc.optimize.lower.context import Computed, WeightOnly
from llmc.optimize.lower.rewrite import Emitter
from llmc.optimize.lower.tensorrt.words import pack_words, unpack_words
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid


def unpacking(bits: int, floors: bool) -> bytes:
    """A model that unpacks words int32 [N, W]; with ``floors`` integers are divided as Python divides them."""
    words = ir.Value(name="words", shape=ir.Shape(["n", "w"]), type=ir.TensorType(ir.DataType.INT32))
    last = ir.node("Identity", [words], name="last")
    last.outputs[0].name = "values"
    last.outputs[0].shape, last.outputs[0].type = ir.Shape(["n", "v"]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([words], last.outputs, nodes=[last], name="unpack", opset_imports={"": 21})
    last.replace_input_with(0, unpack_words(Emitter(last, "unpack"), words, bits))
    if floors:
        floor_division(next(node for node in graph if node.op_type == "Div"))
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


def floor_division(node: ir.Node) -> None:
    """Divide in float64, which holds every int32, and round down."""
    emit = Emitter(node)
    wide = [emit("Cast", value, to=ir.DataType.DOUBLE) for value in node.inputs]
    node.outputs[0].replace_all_uses_with(emit("Cast", emit("Floor", emit("Div", *wide)), to=ir.DataType.INT32))
    node.graph.remove(node, safe=True)


@pytest.mark.parametrize("floors", [False, True], ids=["truncates", "rounds down"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_pattern_of_every_field_comes_back(session, bits, floors):
    """Each byte of a word takes all 256 values beside each value of its neighbours' sign bits."""
    generator = np.random.default_rng(0)
    low, count = -(1 << (bits - 1)), 1 << bits
    edges = np.array([low, -1, 0, count + low - 1], np.int8)
    fields = 32 // bits
    rows = [edges[generator.integers(0, 4, (4096, fields))]]
    for field in range(fields):
        block = edges[generator.integers(0, 4, (4 * count, fields))]
        block[:, field] = np.tile(np.arange(low, low + count), 4)
        rows.append(block)
    rows.append(generator.integers(low, low + count, (20000, fields)))
    values = np.concatenate(rows).astype(np.int8)
    found = session(unpacking(bits, floors)).run(None, {"words": pack_words(values, bits)})[0]
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("width", [1, 3, 8, 13, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_keep_their_order_in_rows_of_any_width(session, bits, width):
    low, count = -(1 << (bits - 1)), 1 << bits
    values = np.random.default_rng(1).integers(low, low + count, (5, width)).astype(np.int8)
    words = pack_words(values, bits)
    assert words.shape == (5, -(-width * bits // 32))
    found = session(unpacking(bits, False)).run(None, {"words": words})[0]
    np.testing.assert_array_equal(found[:, :width], values)
    assert not found[:, width:].any()


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("grid", [Grid(8, 128), Grid(4, 32), Grid(8, positive=True), Grid(4, 128, positive=True)])
def test_rows_of_the_embedding_are_exactly_what_the_integers_stand_for(exported, lowering, decoder, grid, compute):
    """In float32 to the last bit; a narrower type rounds once."""
    case = exported("qwen3-tied-sharded")
    head = WeightOnly(grid if grid.positive else Grid(8, positive=True))
    lowered = lowering(case.export, Computed(), head)
    lowered.before("lower embedding")
    object.__setattr__(lowered.context, "compute", compute)
    object.__setattr__(lowered.context.quant, "head", WeightOnly(grid))
    lowered.apply("lower embedding")
    lowered.weights.close()
    rows = embedded(lowered, decoder)
    table = lowered.context.calibrated.matrix(
        (ir.load(case.export / "decoder.onnx").graph.initializers[TABLE].const_value,)
    )
    block = grid.block if grid.block <= 64 else 64 if grid.bits == 4 else 0
    wanted = rtn.quantize(table, replace(grid, block=block)).dequantize().astype(compute)
    np.testing.assert_array_equal(rows, wanted)


TABLE = "model.embed_tokens.weight"


def embedded(lowered, decoder) -> np.ndarray:
    """All rows of the embedding, by the part of the graph that makes them."""
    ids = next(value for value in lowered.graph.inputs if value.name == "input_ids")
    graph = ir.convenience.extract(lowered.graph, [ids.name], ["hidden.0"])
    graph.opset_imports[""] = 21
    kind = ir.DataType.FLOAT16 if lowered.context.compute == "float16" else ir.DataType.FLOAT
    graph.outputs[0].type, graph.outputs[0].shape = ir.TensorType(kind), ir.Shape(["batch", "sequence", 64])
    path = lowered.folder / "embedding.onnx"
    ir.save(ir.Model(graph, ir_version=10), path)
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": np.arange(96)[None]})[0][0]
