"""Round to nearest with a clip that minimises the mean square error of the weights.

For each group of weights w and each clip ratio r, the scale s = -r * m / 2^(bits-1), where m is the weight of largest
magnitude with its sign, so that m meets the longer, negative end of the grid. Integers are q = clip(round(w / s)); for
fixed q the best scale is the least-squares one, s* = <w, q> / <q, q>, whose error is <w, w> - <w, q>^2 / <q, q>. The
ratio with the least error wins. Source: the clip search is that of OMSE (Choukroun et al. 2019, arXiv:1902.06822),
applied per group; the least-squares scale is the standard alternating step of vector quantization.
"""

import numpy as np

from llmc.optimize.quantize.grid import Float, Grid, Quantized

# A wide grid gains nothing from hard clipping, a narrow one does.
CLIP_RATIOS = {4: tuple(np.linspace(1.0, 0.62, 16)), 8: (1.0, 0.97, 0.94, 0.9)}

# Beyond 2^40 either way, products of weights and integers could leave float32; a power of two changes no rounding.
LARGEST_EXPONENT = 40


def quantize(weights: Float, grid: Grid) -> Quantized:
    """Quantize float32 [N, K]; all-zero groups get scale 0.

    Raises:
        KeyError: no clip ratios are known for ``grid.bits``.
    """
    rows, inputs = weights.shape
    width, groups = grid.width(inputs), grid.groups(inputs)
    padded = weights
    if groups * width != inputs:
        padded = np.zeros((rows, groups * width), np.float32)
        padded[:, :inputs] = weights
    values, scales = _search(padded.reshape(rows * groups, width), grid)
    return Quantized(values.reshape(rows, -1)[:, :inputs], scales.reshape(rows, groups), grid)


def _search(groups: Float, grid: Grid) -> tuple[np.ndarray, Float]:
    """The best integers int8 [G, W] and scales [G] for each row of ``groups`` [G, W] among the clip ratios."""
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)  # (G, 1)
    exponents = np.frexp(extreme)[1]
    if np.abs(exponents).max() > LARGEST_EXPONENT:
        values, scales = _search(np.ldexp(groups, -exponents), grid)
        return values, np.ldexp(scales, exponents[:, 0])
    # The share of <w, w> that a candidate explains is <w, q>^2 / <q, q>: the larger, the smaller the error.
    best_gain = np.full(len(groups), -1.0, np.float32)
    best_scale = np.zeros(len(groups), np.float32)
    best_values = np.zeros(groups.shape, np.int8)
    candidate = np.empty_like(groups)
    for ratio in CLIP_RATIOS[grid.bits]:
        inverse = np.divide(grid.low / ratio, extreme, out=np.zeros_like(extreme), where=extreme != 0)
        np.rint(np.multiply(groups, inverse, out=candidate), out=candidate)
        np.clip(candidate, grid.low, grid.high, out=candidate)
        projection = np.einsum("gw,gw->g", groups, candidate)
        norm = np.maximum(np.einsum("gw,gw->g", candidate, candidate), 1.0)
        better = projection * projection / norm > best_gain
        best_gain[better] = (projection * projection / norm)[better]
        best_scale[better] = (projection / norm)[better]
        best_values[better] = candidate[better]
    return best_values, best_scale
