"""Weights as TensorRT takes them: [inputs, outputs], symmetric, every scale above zero."""

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.names import EMBEDDING
from llmc.errors import BuildError
from llmc.exported import Weight, in_parallel, pieces, sizes
from llmc.optimize.lower.context import ARRAY_TYPES, LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.quantize.grid import Float, Grid, Quantized
from llmc.optimize.weights.store import grid_name

Array = NDArray[np.generic]

# The smallest scale that is stored. float16 still has 16 steps below it; weights of a group that would need a smaller
# one are below 2e-4 and are rounded to this one.
SMALLEST_SCALE = 2.0**-20
INT4_BLOCKS = (128, 64, 32)
TABLE = f"{EMBEDDING}.weight"


def narrow_values(values: Float, compute: str, name: str) -> Array:
    with np.errstate(over="ignore"):
        narrow: Array = values.astype(ARRAY_TYPES[compute])
    if not np.isfinite(narrow.astype(np.float32)).all():
        raise BuildError(f"{name} holds weights beyond {compute}'s range; build with --bf16 or --fp32")
    return narrow


# -------------------------------------------------------------------------------------------------- float weights


def float_rows(tensor: Weight, context: LoweringContext) -> ir.ExternalTensor:
    """A matrix [N, K] in the compute type."""
    name = f"{tensor.name}.{context.compute}"
    return context.weights.add([name], lambda: [_fill(np.empty(sizes(tensor), context.array_type), [tensor], context)])[
        0
    ]


def float_columns(linear: Linear, context: LoweringContext) -> ir.ExternalTensor:
    """A linear's weights [K, N] in the compute type."""
    name = f"{linear.tensor}.{context.compute}.columns"
    columns = (linear.inputs, linear.outputs)
    return context.weights.add(
        [name], lambda: [_fill(np.empty(columns, context.array_type).T, linear.weights, context).T]
    )[0]


def _fill(matrix: Array, tensors: Sequence[Weight], context: LoweringContext) -> Array:
    """Write stacked matrices into one [N, K] of the compute type, in pieces that are read on all cores."""

    def read(part: tuple[Weight, tuple[int, int]]) -> Array:
        tensor, span = part
        return narrow_values(context.calibrated.rows(tensor, *span), context.compute, tensor.name or "")

    start = 0
    for rows in in_parallel(read, [(it, span) for it in tensors for span in pieces(sizes(it))]):
        matrix[start : start + len(rows)] = rows
        start += len(rows)
    return matrix


# ------------------------------------------------------------------------------------------------ integer weights


def integer_columns(linear: Linear, grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """A linear's weights int8 or int4 [K, N] and their scales, [N], or [groups, N] of blocks, in the compute type."""
    if not grid.symmetric:
        raise BuildError(f"{linear.module}: TensorRT has no zero points; build with symmetric = true")
    if not grid.positive:
        raise BuildError(f"{linear.module}: TensorRT takes only scales above zero, and {grid_name(grid)} has others")
    if grid.bits == 4 and linear.outputs % 2:
        raise BuildError(
            f"{linear.module}: TensorRT packs int4 weights in pairs of outputs, and there are {linear.outputs}; "
            'store it otherwise: layers = {"' + linear.module + '" = "fp16"}'
        )
    dtype = context.array_type
    kind = np.dtype(np.int8 if grid.bits == 8 else ml_dtypes.int4)

    def make() -> list[Array]:
        quantized = context.calibrated.quantize_stacked(linear.weights, grid)
        values, scales = as_stored(quantized, dtype)
        return [values.T.astype(kind, order="C"), scales.T if grid.block else scales[:, 0]]

    name = f"{linear.tensor}.{grid_name(grid)}.{dtype.name}"
    return context.weights.add([name, f"{name}.scales"], make)


def as_stored(quantized: Quantized, dtype: np.dtype[np.generic]) -> tuple[NDArray[np.int8], Array]:
    """A matrix on a positive grid with scales of type ``dtype``: int8 [N, K], and scales [N, groups].

    Where ``dtype`` holds a scale only roughly, integers are rounded anew to what it holds.
    """
    if not (quantized.scales > 0).all():
        raise BuildError(
            "TensorRT takes only scales above zero, and integers that the checkpoint stores have others; build with "
            "--int4 or --int8, which choose them anew"
        )
    rows, inputs = quantized.values.shape
    groups = quantized.scales.shape[1]
    values, scales = np.empty((rows, groups, inputs // groups), np.int8), round_scales(quantized.scales, dtype)
    held = (quantized.scales / scales.astype(np.float32))[..., None]

    def fill(span: tuple[int, int]) -> None:
        part = slice(*span)
        again = np.rint(quantized.values[part].reshape(-1, *values.shape[1:]) * held[part])
        values[part] = np.clip(again, quantized.grid.low, quantized.grid.high)

    for _ in in_parallel(fill, pieces((rows, inputs))):
        pass
    return values.reshape(rows, inputs), scales


def round_scales(scales: Float, dtype: np.dtype[np.generic]) -> Array:
    """Scales above zero in the type that they are stored in."""
    with np.errstate(over="ignore"):
        rounded: Array = np.maximum(scales, SMALLEST_SCALE).astype(dtype)
    if not np.isfinite(rounded.astype(np.float32)).all():
        raise BuildError(f"a scale of {float(scales.max())} is beyond {dtype.name}; build with --fp32")
    return rounded


def fit_grid(grid: Grid, inputs: int, name: str) -> Grid:
    """The grid with a block that divides the inputs: its own, or the largest of 128, 64 and 32 below it that does.

    Raises:
        BuildError: there is none.
    """
    if not grid.block or inputs % grid.block == 0:
        return grid
    block = next((block for block in INT4_BLOCKS if block < grid.block and inputs % block == 0), None)
    if block is None:
        raise BuildError(
            f"{name}: none of 128, 64 and 32 divides its {inputs} inputs, and TensorRT takes only whole blocks of int4 "
            'weights; store it otherwise: layers = {"' + name + '" = "fp16"}'
        )
    return replace(grid, block=block)
