"""Round to nearest with a clip that minimises the mean square error of the weights.

For each group of weights w and each clip ratio r, a symmetric grid takes the scale s = -r * m / 2^(bits-1), where m is
the weight of largest magnitude with its sign, so that m meets the longer, negative end of the grid. A positive grid
cannot choose ends: s = r * max(max(w) / (2^(bits-1) - 1), -min(w) / 2^(bits-1)) is the smallest scale that, at r = 1,
clips nothing. An asymmetric one spans zero and all weights, s = r * (max(w, 0) - min(w, 0)) / (2^bits - 1), and has the
zero point z = round(-2^(bits-1) - min(w, 0) * r / s), which is the same for every r. Steps are c = q - z =
clip(round(w / s)); for fixed c the best scale is the least-squares one, s* = <w, c> / <c, c>, whose error is
<w, w> - <w, c>^2 / <c, c>. The ratio with the least error wins. Where s is above zero, the signs of c are those of w,
and so s* is not below zero.

Sources: the clip search is that of OMSE (Choukroun et al. 2019, arXiv:1902.06822), applied per group; the least-squares
scale is the standard alternating step of vector quantization. Plain rounding is equation 1 of AWQ (arXiv:2306.00978),
with the sign of m.
"""

import numpy as np

from llmc.optimize.quantize.grid import SMALLEST_SCALE, Float, Grid, Quantized

# A wide grid gains nothing from hard clipping, a narrow one does.
CLIP_RATIOS = {4: tuple(np.linspace(1.0, 0.68, 9)), 8: (1.0, 0.97, 0.94, 0.9)}

# Beyond 2^40 either way, products of weights and integers could leave float32; a power of two changes no rounding.
LARGEST_EXPONENT = 40


def quantize(weights: Float, grid: Grid) -> Quantized:
    """Quantize float32 [N, K]; all-zero groups get scale 0, on a positive grid the smallest normal number.

    Args:
        weights: [N, K].
        grid: bits, block and symmetry.
    """
    rows, inputs = weights.shape
    width, groups = grid.width(inputs), grid.groups(inputs)
    padded = weights
    if groups * width != inputs:
        padded = np.zeros((rows, groups * width), np.float32)
        padded[:, :inputs] = weights
    values, scales, zeros = _search_scaled(padded.reshape(rows * groups, width), grid)
    return Quantized(
        values.reshape(rows, -1)[:, :inputs],
        (np.where(scales > 0, scales, np.float32(SMALLEST_SCALE)) if grid.positive else scales).reshape(rows, groups),
        grid,
        None if grid.symmetric else zeros.reshape(rows, groups),
    )


def _search_scaled(groups: Float, grid: Grid) -> tuple[np.ndarray, Float, np.ndarray]:
    """:func:`_search` on weights brought to a magnitude whose squares float32 holds."""
    exponents = np.frexp(np.abs(groups).max(axis=1, keepdims=True))[1]
    if np.abs(exponents).max() <= LARGEST_EXPONENT:
        return _search(groups, grid)
    values, scales, zeros = _search(np.ldexp(groups, -exponents), grid)
    return values, np.ldexp(scales, exponents), zeros


def _search(groups: Float, grid: Grid) -> tuple[np.ndarray, Float, np.ndarray]:
    """The best integers int8 [G, W], scales [G, 1] and zero points int8 [G, 1] for each row of ``groups`` [G, W]."""
    unclipped, zeros = whole_range(groups, grid)
    candidate = np.empty_like(groups)
    # The share of <w, w> that a candidate explains is <w, c>^2 / <c, c>: the larger, the smaller the error.
    best_gain = np.full(len(groups), -1.0, np.float32)
    best_scale = np.zeros_like(unclipped)
    best_values = np.zeros(groups.shape, np.int8)
    for ratio in CLIP_RATIOS[grid.bits]:
        scales = unclipped * np.float32(ratio)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        np.rint(np.multiply(groups, inverse, out=candidate), out=candidate)
        np.clip(candidate, grid.low - zeros, grid.high - zeros, out=candidate)  # steps c = q - z
        projection = np.einsum("gw,gw->g", groups, candidate)
        norm = np.maximum(np.einsum("gw,gw->g", candidate, candidate), 1.0)
        better = projection * projection / norm > best_gain
        best_gain[better] = (projection * projection / norm)[better]
        best_scale[better, 0] = (projection / norm)[better]
        best_values[better] = (candidate if grid.symmetric else candidate + zeros)[better]
    return best_values, best_scale, zeros.astype(np.int8)


def whole_range(groups: Float, grid: Grid) -> tuple[Float, Float]:
    """Scales [G, 1] that clip no weight of ``groups`` [G, W], 0 where all are 0, and their zero points [G, 1]."""
    if grid.positive:
        highest, lowest = groups.max(axis=1, keepdims=True), groups.min(axis=1, keepdims=True)
        reached = np.maximum(highest / np.float32(grid.high), lowest / np.float32(grid.low))
        return reached, np.zeros_like(reached)
    if grid.symmetric:
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
        return extreme / np.float32(grid.low), np.zeros_like(extreme)
    lowest = np.minimum(groups.min(axis=1, keepdims=True), 0)
    scales = (np.maximum(groups.max(axis=1, keepdims=True), 0) - lowest) / np.float32(grid.high - grid.low)
    below = np.divide(lowest, scales, out=np.zeros_like(scales), where=scales != 0)
    return scales, np.clip(np.rint(grid.low - below), grid.low, grid.high) * (scales != 0)
