"""The embedding for ONNX Runtime: only the rows asked for are read, stored as a tied head is or as the checkpoint's
own codes."""

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.names import EMBEDDING, PER_LAYER
from llmc.exported import CodedTensor, Weight, sizes
from llmc.optimize.lower.context import Float16, LoweringContext, OwnCodes, WeightOnly, choose_table_config
from llmc.optimize.lower.linears import replace_gather
from llmc.optimize.lower.onnxruntime.linears import float_table, pack_linear
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, emit_conversion, initializer, vector
from llmc.optimize.quantize.grid import Grid


def lower_embedding(graph: ir.Graph, context: LoweringContext) -> int:
    """Gather(embedding, ids) -> a gather of rows that are then converted."""
    return sum(
        replace_gather(graph, name, lambda emit, table: _rows(emit, table, context)) for name in (EMBEDDING, PER_LAYER)
    )


def lower_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The same for small tables, of positions, types of tokens and distances: rows in the compute type."""

    def rows(emit: Emitter, table: Weight) -> ir.Value:
        stored = float_table(table, context.compute, context)
        return emit("Gather", initializer(graph, stored), emit.anchor.inputs[1], axis=0)

    return sum(replace_gather(graph, name, rows) for name in context.geometry.small_tables)


def _rows(emit: Emitter, table: Weight, context: LoweringContext) -> ir.Value:
    listed = next(it for it in context.geometry.tables if it.name == emit.anchor.name)
    match choose_table_config(context.quant, context.geometry, listed):
        case OwnCodes():
            assert isinstance(table, CodedTensor)
            return _unpack_rows(emit, table, context)
        case WeightOnly(grid):
            return _dequantize_blocked_rows(emit, table, grid, context)
        case config:
            stored = float_table(table, "float16" if config == Float16() else "float32", context)
            rows = emit("Gather", initializer(emit.graph, stored), emit.anchor.inputs[1], axis=0)
            return emit_conversion(emit, rows, stored.dtype, context.type)


def _dequantize_blocked_rows(emit: Emitter, table: Weight, grid: Grid, context: LoweringContext) -> ir.Value:
    """Dequantized rows [B, S, H] of a blocked matrix: the bytes of a head's MatMulNBits, seen as rows."""
    packed, *others = pack_linear((table,), grid, context)
    outputs, hidden = sizes(table)
    flat = context.weights.view(packed, (outputs, math.prod(sizes(packed)[1:])))
    rows = emit(
        "GatherBlockQuantized",
        initializer(emit.graph, flat),
        emit.anchor.inputs[1],
        *(initializer(emit.graph, tensor) for tensor in (others[:1] if grid.shifted else others)),
        domain=MICROSOFT,
        bits=grid.bits,
        block_size=grid.block,
        gather_axis=0,
        quantize_axis=1,
    )
    if hidden % grid.block:
        rows = emit("Slice", rows, vector(emit.graph, [0]), vector(emit.graph, [hidden]), vector(emit.graph, [-1]))
    if not grid.shifted:
        return rows
    assert isinstance(table, CodedTensor)
    return _add_offsets(emit, rows, table, context)  # the head's are rounded


# Bits of every byte, the lowest first.
_BITS = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


def _unpack_rows(emit: Emitter, table: CodedTensor, context: LoweringContext) -> ir.Value:
    """Rows [B, S, H] of codes of any width, each bit of them times its value, in the compute type."""
    codes, scales = context.weights.add([f"{table.name}.rows", f"{table.name}.rows.scales"], lambda: _pack_rows(table))
    rows, graph, (_, hidden), block = _gather(emit, codes), emit.graph, sizes(table), table.kind.block
    if codes.dtype == ir.DataType.INT8:
        rows = emit("Cast", rows, to=ir.DataType.FLOAT)
    else:
        _, bits, _ = sizes(codes)
        values = np.array([[*(2**bit for bit in range(bits - 1)), -(2 ** (bits - 1))]], np.float32)
        rows = emit("Gather", constant(graph, "bits_of_bytes", _BITS), emit("Cast", rows, to=ir.DataType.INT32), axis=0)
        rows = emit("Reshape", rows, vector(graph, [0, 0, bits, hidden]))
        rows = emit("MatMul", constant(graph, f"values_of_{bits}_bits", values), rows)
    factors = emit_conversion(emit, _gather(emit, scales), scales.dtype, ir.DataType.FLOAT)
    rows = emit("Mul", emit("Reshape", rows, vector(graph, [0, 0, hidden // block, block])), factors)
    rows = emit_conversion(emit, rows, ir.DataType.FLOAT, context.type)
    if table.kind.offsets:
        return _add_offsets(emit, rows, table, context)
    return emit("Reshape", rows, vector(graph, [0, 0, hidden]))


def _pack_rows(table: CodedTensor) -> list[NDArray[np.generic]]:
    """Codes [N, K] in the fewest bits that hold them, as bit planes uint8 [N, bits, K / 8] (the lowest bits first) or
    int8 [N, K], and scales [N, groups, 1], float16 if that is exact."""
    codes, scales, zeros, _ = table.read()
    assert zeros is None and table.order is None, f"{table.name}: rows have scales and offsets alone"
    bits = max(int(codes.max()), ~int(codes.min())).bit_length() + 1
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    exact = np.array_equal(halves, scales)
    planes = [np.packbits(codes >> bit & 1, axis=1, bitorder="little") for bit in range(bits if bits < 8 else 0)]
    return [np.stack(planes, 1) if planes else codes, (halves if exact else scales)[..., None]]


def _add_offsets(emit: Emitter, rows: ir.Value, table: CodedTensor, context: LoweringContext) -> ir.Value:
    """Rows [B, S, H], and the checkpoint's offset of each block added."""

    def make() -> list[NDArray[np.generic]]:
        *_, offsets = table.read()
        assert offsets is not None
        return [offsets[..., None].astype(context.array_type)]

    (stored,) = context.weights.add([f"{table.name}.rows.offsets.{context.compute}"], make)
    (_, hidden), block = sizes(table), table.kind.block
    groups = emit("Reshape", rows, vector(emit.graph, [0, 0, hidden // block, block]))
    return emit("Reshape", emit("Add", groups, _gather(emit, stored)), vector(emit.graph, [0, 0, hidden]))


def _gather(emit: Emitter, table: ir.ExternalTensor) -> ir.Value:
    return emit("Gather", initializer(emit.graph, table), emit.anchor.inputs[1], axis=0)
