"""Integers of 4 or 8 bits in int32 words: how a table of them is packed, and how a graph unpacks rows of it.

The arithmetic is exact in float32 and does not depend on whether a division of integers truncates or rounds down.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.exported import Weight
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import Emitter, scalar
from llmc.optimize.quantize.grid import Grid, Quantized
from llmc.optimize.weights.store import grid_name

HALF_WORD = 1 << 16


def pack_table(
    table: Weight, grid: Grid, context: LoweringContext, found: Quantized | None = None
) -> list[ir.ExternalTensor]:
    """Words int32 [V, words] and scales float32 [V, groups] of a matrix [V, H]; here a scale may be negative.

    ``found`` are its integers, where somebody has them already.
    """

    def make() -> list[NDArray[np.generic]]:
        integers = found or context.calibrated.quantize_stacked((table,), grid)
        return [pack_words(integers.values, integers.grid.bits), integers.scales]

    name = f"{table.name}.{grid_name(grid)}.words"
    return context.weights.add([name, f"{name}.scales"], make)


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
