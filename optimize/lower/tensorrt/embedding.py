"""The embedding for TensorRT: only the rows asked for are read.

TensorRT gathers no int8 or int4. Integers are packed into int32 words, whose rows it gathers, and unpacked by
arithmetic, see :mod:`.words`.
"""

import onnx_ir as ir

from llmc.errors import BuildError
from llmc.exported import Weight, sizes
from llmc.inventory import EMBEDDING, POSITIONS
from llmc.optimize.lower.context import Computed, LoweringContext, Static, WeightOnly
from llmc.optimize.lower.linears import replace_gather
from llmc.optimize.lower.rewrite import Emitter, emit_conversion, initializer, vector
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.lower.tensorrt.slots import token_positions
from llmc.optimize.lower.tensorrt.words import pack_table, unpack_words
from llmc.optimize.quantize.grid import Grid


def lower_embedding(graph: ir.Graph, context: LoweringContext) -> int:
    """Gather(embedding, ids) -> a gather of rows in the compute type, or of packed ones that are then unpacked."""
    return replace_gather(graph, EMBEDDING, lambda emit, table: _rows(emit, table, context))


def lower_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The same for a table of learned positions, which is small: rows in the compute type."""

    def rows(emit: Emitter, table: Weight) -> ir.Value:
        return emit("Gather", initializer(graph, weights.float_rows(table, context)), token_positions(emit), axis=0)

    return replace_gather(graph, POSITIONS, rows)


def _rows(emit: Emitter, table: Weight, context: LoweringContext) -> ir.Value:
    match context.embedding:
        case Computed():
            rows = initializer(emit.graph, weights.float_rows(table, context))
            return emit("Gather", rows, emit.anchor.inputs[1], axis=0)
        case WeightOnly(grid) | Static(grid):
            return _unpack_rows(emit, table, grid, context)
    raise BuildError(f"{emit.name}: TensorRT gathers no rows stored as {context.embedding}; build with another head")


def _unpack_rows(emit: Emitter, table: Weight, grid: Grid, context: LoweringContext) -> ir.Value:
    graph, ids, hidden = emit.graph, emit.anchor.inputs[1], sizes(table)[1]
    grid = _grid(grid, hidden, emit.name)
    tables = (initializer(graph, tensor) for tensor in pack_table(table, grid, context))
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
    return emit_conversion(emit, rows, ir.DataType.FLOAT, context.type)


def _grid(grid: Grid, hidden: int, name: str) -> Grid:
    """A grid whose blocks are whole; 8 bits are enough without blocks."""
    if not grid.symmetric:
        raise BuildError(f"{name}: TensorRT has no zero points; build with symmetric = true")
    if grid.bits == 8 and grid.block and hidden % grid.block:
        return Grid(8)
    return weights.fit_grid(grid, hidden, name)
