"""The embedding for ONNX Runtime: only the rows asked for are read, stored as a tied head is."""

import math

import onnx_ir as ir

from llmc.exported import Weight, sizes
from llmc.inventory import EMBEDDING, PER_LAYER, POSITIONS
from llmc.optimize.lower.context import Float16, LoweringContext, WeightOnly
from llmc.optimize.lower.linears import replace_gather
from llmc.optimize.lower.onnxruntime.linears import float_table, pack_linear
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, emit_conversion, initializer, vector
from llmc.optimize.quantize.grid import Grid


def lower_embedding(graph: ir.Graph, context: LoweringContext) -> int:
    """Gather(embedding, ids) -> a gather of rows that are then converted."""
    return sum(
        replace_gather(graph, name, lambda emit, table: _rows(emit, table, context)) for name in (EMBEDDING, PER_LAYER)
    )


def lower_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The same for a table of learned positions, which is small: rows in the compute type."""

    def rows(emit: Emitter, table: Weight) -> ir.Value:
        stored = float_table(table, context.compute, context)
        return emit("Gather", initializer(graph, stored), emit.anchor.inputs[1], axis=0)

    return replace_gather(graph, POSITIONS, rows)


def _rows(emit: Emitter, table: Weight, context: LoweringContext) -> ir.Value:
    if isinstance(config := context.embedding, WeightOnly):
        return _dequantize_blocked_rows(emit, (table,), config.grid, context)
    stored = float_table(table, "float16" if config == Float16() else "float32", context)
    rows = emit("Gather", initializer(emit.graph, stored), emit.anchor.inputs[1], axis=0)
    return emit_conversion(emit, rows, stored.dtype, context.type)


def _dequantize_blocked_rows(emit: Emitter, table: tuple[Weight], grid: Grid, context: LoweringContext) -> ir.Value:
    """Dequantized rows [B, S, H] of a blocked matrix: the bytes of a head's MatMulNBits, seen as rows."""
    packed, *scales_and_zeros = pack_linear(table, grid, context)
    outputs, hidden = sizes(table[0])
    flat = context.weights.view(packed, (outputs, math.prod(sizes(packed)[1:])))
    rows = emit(
        "GatherBlockQuantized",
        initializer(emit.graph, flat),
        emit.anchor.inputs[1],
        *(initializer(emit.graph, tensor) for tensor in scales_and_zeros),
        domain=MICROSOFT,
        bits=grid.bits,
        block_size=grid.block,
        gather_axis=0,
        quantize_axis=1,
    )
    if hidden % grid.block:
        rows = emit("Slice", rows, vector(emit.graph, [0]), vector(emit.graph, [hidden]), vector(emit.graph, [-1]))
    return rows
