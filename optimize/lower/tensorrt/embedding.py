"""The embedding for TensorRT: only the rows asked for are read.

TensorRT gathers no int8 or int4. Integers are packed into int32 words, whose rows it gathers, and unpacked by
arithmetic, see :mod:`.words`.
"""

import onnx_ir as ir

from llmc.errors import BuildError
from llmc.inventory import EMBEDDING
from llmc.optimize.lower.context import Computed, LoweringContext, Static, WeightOnly
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import Emitter, initializer, nodes_of, replace, sizes, sole_consumer, vector
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.lower.tensorrt.words import packed_table, unpack_words
from llmc.optimize.quantize.grid import Grid


def lower_embedding(graph: ir.Graph, context: LoweringContext) -> int:
    """Gather(embedding, ids) -> a gather of rows in the compute type, or of packed ones that are then unpacked."""
    count = 0
    for gather in nodes_of(graph, "Gather"):
        if gather.name != EMBEDDING:
            continue
        emit, table = Emitter(gather), stored(gather.inputs[0])
        match context.embedding:
            case Computed():
                rows = emit("Gather", initializer(graph, weights.float_rows(table, context)), gather.inputs[1], axis=0)
            case WeightOnly(grid) | Static(grid):
                rows = _unpacked_rows(emit, table, grid, context)
            case config:
                raise BuildError(f"{gather.name}: TensorRT gathers no rows stored as {config}; build with another head")
        cast = sole_consumer(gather.outputs[0])
        replace(gather if cast is None or cast.op_type != "Cast" else cast, rows)
        count += 1
    return count


def _unpacked_rows(emit: Emitter, table: ir.ExternalTensor, grid: Grid, context: LoweringContext) -> ir.Value:
    """Rows [B, S, H] in the compute type, from integers in words and their scales."""
    graph, ids, hidden = emit.graph, emit.anchor.inputs[1], sizes(table)[1]
    grid = _grid(grid, hidden, emit.name)
    tables = (initializer(graph, tensor) for tensor in packed_table(table, grid, context))
    words, scales = (emit("Gather", values, ids, axis=0) for values in tables)
    rows = unpack_words(emit, words, grid.bits)
    if grid.block:
        groups = emit("Reshape", rows, vector(graph, [0, 0, -1, grid.block]))
        scaled = emit("Mul", groups, emit("Unsqueeze", scales, vector(graph, [-1])))
        rows = emit("Reshape", scaled, vector(graph, [0, 0, -1]))
    else:
        rows = emit("Mul", rows, scales)
    if hidden % (32 // grid.bits):
        rows = emit("Slice", rows, vector(graph, [0]), vector(graph, [hidden]), vector(graph, [-1]))
    return rows if context.compute == "float32" else emit("Cast", rows, to=weights.compute_type(context))


def _grid(grid: Grid, hidden: int, name: str) -> Grid:
    """A grid whose blocks are whole; 8 bits are enough without blocks."""
    if not grid.symmetric:
        raise BuildError(f"{name}: TensorRT has no zero points; build with symmetric = true")
    if grid.bits == 8 and grid.block and hidden % grid.block:
        return Grid(8)
    return weights.fitted(grid, hidden, name)
