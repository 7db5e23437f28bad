"""Weights rounded without any search, and integers as a graph stores them unpacked again."""

import numpy as np
from numpy.typing import NDArray

from llmc.optimize.quantize.grid import SMALLEST_SCALE, Grid, Quantized


def plain(weights: np.ndarray, grid: Grid) -> Quantized:
    """Round to nearest on the whole range, group by group in float64.

    A symmetric grid puts the extreme weight at the end of the grid, as GGML's Q4_0 and Q8_0 do.
    """
    shape = len(weights), grid.groups(weights.shape[1])
    values, scales = np.zeros(weights.shape, np.int8), np.zeros(shape, np.float32)
    zeros = np.zeros(shape, np.int8)
    width = grid.width(weights.shape[1])
    for row, group in np.ndindex(shape):
        part = weights[row, group * width : (group + 1) * width].astype(np.float64)
        low, high = min(part.min(), 0), max(part.max(), 0)
        scale = part[np.abs(part).argmax()] / grid.low if grid.symmetric else (high - low) / (grid.high - grid.low)
        if grid.positive:
            scale = max(high / grid.high, low / grid.low, SMALLEST_SCALE)
        if scale:
            zero = 0 if grid.symmetric else np.clip(np.rint(grid.low - low / scale), grid.low, grid.high)
            scales[row, group], zeros[row, group] = scale, zero
            values[row, group * width : group * width + len(part)] = np.clip(
                np.rint(part / scale) + zero, grid.low, grid.high
            )
    return Quantized(values, scales, grid, None if grid.symmetric else zeros)


def unpack_blocks(packed: NDArray[np.uint8], grid: Grid, inputs: int) -> NDArray[np.int8]:
    """The inverse of :func:`llmc.optimize.quantize.grid.pack_blocks`: int8 [N, ``inputs``]."""
    return _unpack(packed.reshape(packed.shape[0], -1), grid, inputs)


def unpack_zero_points(packed: NDArray[np.uint8], grid: Grid, groups: int) -> NDArray[np.int8]:
    """The inverse of :func:`llmc.optimize.quantize.grid.pack_zero_points`: int8 [N, ``groups``]."""
    return _unpack(packed, grid, groups)


def _unpack(packed: NDArray[np.uint8], grid: Grid, width: int) -> NDArray[np.int8]:
    """uint8 [N, bytes] -> int8 [N, ``width``]."""
    if grid.bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return (packed[:, :width].astype(np.int16) + grid.low).astype(np.int8)
