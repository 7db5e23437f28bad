"""The embedding for TensorRT: only the rows asked for are read.

TensorRT gathers no int8 or int4. Integers are packed into int32 words, whose rows it gathers, and unpacked by
arithmetic that is exact in float32 and does not depend on whether a division of integers truncates or rounds down.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.optimize.calibrated import grid_name
from llmc.optimize.lower.plan import Computed, Plan, Static, WeightOnly
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.rewrite import Emitter, initializer, nodes_of, replace, scalar, sizes, sole_consumer, vector

HALF_WORD = 1 << 16


def lower_embedding(graph: ir.Graph, plan: Plan) -> int:
    """Gather(embedding, ids) -> a gather of rows in the compute type, or of packed ones that are then unpacked."""
    count = 0
    for gather in nodes_of(graph, "Gather"):
        if gather.name != "model.embed_tokens":
            continue
        emit, table = Emitter(gather), stored(gather.inputs[0])
        match plan.embedding:
            case Computed():
                rows = emit("Gather", initializer(graph, weights.float_rows(table, plan)), gather.inputs[1], axis=0)
            case WeightOnly(grid) | Static(grid):
                rows = _unpacked_rows(emit, table, grid, plan)
            case form:
                raise BuildError(f"{gather.name}: TensorRT gathers no rows stored as {form}; build with another head")
        cast = sole_consumer(gather.outputs[0])
        replace(gather if cast is None or cast.op_type != "Cast" else cast, rows)
        count += 1
    return count


def _unpacked_rows(emit: Emitter, table: ir.ExternalTensor, grid: Grid, plan: Plan) -> ir.Value:
    """Rows [B, S, H] in the compute type, from integers in words and their scales."""
    graph, ids, hidden = emit.graph, emit.anchor.inputs[1], sizes(table)[1]
    grid = _grid(grid, hidden, emit.name)
    tables = (initializer(graph, tensor) for tensor in _packed_table(table, grid, plan))
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
    return rows if plan.compute == "float32" else emit("Cast", rows, to=weights.compute_type(plan))


def _grid(grid: Grid, hidden: int, name: str) -> Grid:
    """A grid whose blocks are whole; 8 bits are enough without blocks."""
    if not grid.symmetric:
        raise BuildError(f"{name}: TensorRT has no zero points; build with symmetric = true")
    if grid.bits == 8 and grid.block and hidden % grid.block:
        return Grid(8)
    return weights.fitted(grid, hidden, name)


def _packed_table(table: ir.ExternalTensor, grid: Grid, plan: Plan) -> list[ir.ExternalTensor]:
    """Words int32 [V, words] and scales float32 [V, groups]; here a scale may be negative."""

    def make() -> list[NDArray[np.generic]]:
        found = plan.calibrated.quantized((table,), grid)
        return [pack_words(found.values, grid.bits), found.scales]

    name = f"{table.name}.{grid_name(grid)}.words"
    return plan.weights.add([name, f"{name}.scales"], make)


def pack_words(values: NDArray[np.int8], bits: int) -> NDArray[np.int32]:
    """Integers [V, H] of 4 or 8 bits in words [V, ceil(H * bits / 32)], zeros at the end.

    Field i of word j, counted in the order in which :func:`unpack_words` splits words, holds column i * words + j. All
    fields are offset by 2^(bits-1), and the word by -2^31.
    """
    fields = 32 // bits
    words = -(-values.shape[1] // fields)
    packed: NDArray[np.uint32] = np.zeros((len(values), words), np.uint32)
    for field, shift in enumerate(_shifts(bits)):
        part = values[:, field * words : (field + 1) * words]
        offset = np.full((len(values), words), 1 << (bits - 1), np.uint32)
        offset[:, : part.shape[1]] = part.astype(np.int16) + (1 << (bits - 1))
        packed |= offset << np.uint32(shift)
    packed ^= np.uint32(1 << 31)
    return packed.view(np.int32)


def _shifts(bits: int) -> list[int]:
    """By how many bits each field lies above the lowest: splitting takes the lower parts of all, then the upper."""
    shifts, width = [0], 32
    while width > bits:
        width //= 2
        shifts = [*shifts, *(shift + width for shift in shifts)]
    return shifts


def unpack_words(emit: Emitter, words: ir.Value, bits: int) -> ir.Value:
    """The inverse of :func:`pack_words` in the graph: float32 [..., words * 32 / bits] of [..., words]."""
    graph = emit.graph
    whole = scalar(graph, HALF_WORD, np.int32)
    upper = emit("Div", words, whole)
    lower = emit("Sub", words, emit("Mul", upper, whole))
    # A division that truncates leaves a negative rest below negative words.
    borrowed = emit("Cast", emit("Less", lower, scalar(graph, 0, np.int32)), to=ir.DataType.INT32)
    lower = emit("Add", lower, emit("Mul", borrowed, whole))
    upper = emit("Add", emit("Sub", upper, borrowed), scalar(graph, HALF_WORD // 2, np.int32))
    parts = emit("Cast", emit("Concat", lower, upper, axis=-1), to=ir.DataType.FLOAT)
    width = 16
    while width > bits:
        width //= 2
        upper = emit("Floor", emit("Mul", parts, scalar(graph, 2.0**-width, np.float32)))
        lower = emit("Sub", parts, emit("Mul", upper, scalar(graph, 2.0**width, np.float32)))
        parts = emit("Concat", lower, upper, axis=-1)
    return emit("Sub", parts, scalar(graph, 2.0 ** (bits - 1), np.float32))
