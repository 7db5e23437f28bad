"""Weights rounded without any search."""

import numpy as np

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
