"""AWQ: scale input channels up where activations are large, so that their weights lose less, then clip by output error.

For weights W [N, K], inputs with second moment H = X^T X / tokens [K, K] and positive scales s [K], the weights become
D + W = Q(W s) / s, where Q rounds to nearest, and 1 / s goes into what precedes the linear. The mean square error of
the outputs is tr(D H D^T) exactly, so activations need not be kept. Scales are searched as

    s = m^alpha / (w^(1 - alpha)),    or without w,    alpha = 0, 1 / 20, 2 / 20, ...

with m the mean magnitude of each input and w the mean over outputs of |W| over its group's largest, as in the authors'
implementation; s = 1 is the first candidate, so the result never does worse by this measure. Source: Lin et al. 2023,
arXiv:2306.00978, equations 4 and 5 (scales) and section 5.1 (clip).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llmc.optimize.quantize import clip
from llmc.optimize.quantize.grid import Grid, Quantized

# Scales stay within this factor of their geometric middle: what precedes the linear may be stored in 16 bits.
LARGEST_SCALE = 1e2
# Values of alpha that are tried.
STEPS = 20


def search_scales(weights: Sequence[Tensor], mean_abs: Tensor, moment: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Scales [K] with which the weights that read one activation lose least when they are rounded.

    Args:
        weights: matrices [N_i, K], to be multiplied by the scales.
        mean_abs: mean magnitude of each channel of the activation [K], which is to be divided by the scales.
        moment: its second moment X^T X / tokens, float32 [K, K].
        grids: the grid of each matrix.
    """
    best = torch.ones_like(mean_abs)
    least = output_error(weights, moment, grids, best)
    for scales in _candidates(weights, mean_abs, grids):
        error = output_error(weights, moment, grids, scales)
        if error < least:
            best, least = scales, error
    return best


def _candidates(weights: Sequence[Tensor], mean_abs: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
    inputs = mean_abs.clamp(min=1e-4 * float(mean_abs.max()) or 1.0)
    shares = torch.stack([_shares(weight, grid) for weight, grid in zip(weights, grids, strict=True)]).mean(0)
    for alpha in np.linspace(0, 1, STEPS, endpoint=False).tolist():
        for found in (inputs**alpha, inputs**alpha / shares ** (1 - alpha)):
            middle = (found.amax() * found.amin()).sqrt()
            yield (found / middle).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)


def _shares(weights: Tensor, grid: Grid) -> Tensor:
    """Mean over outputs of each weight's magnitude over the largest of its group, [K]."""
    groups = torch.split(weights.abs(), grid.width(weights.shape[1]), dim=1)
    parts = [(group / group.amax(1, keepdim=True).clamp(min=1e-12)).mean(0) for group in groups]
    return torch.cat(parts).clamp(min=1e-4)


def output_error(weights: Sequence[Tensor], moment: Tensor, grids: Sequence[Grid], scales: Tensor) -> float:
    """Mean square error of all outputs when W * scales is rounded to nearest: sum_i tr(D_i H D_i^T)."""
    total = 0.0
    for weight, grid in zip(weights, grids, strict=True):
        change = clip.rounded(weight.float() * scales, grid) / scales - weight
        total += float(((change @ moment) * change).sum())
    return total


def quantize(weights: Tensor, second_moment: Tensor, grid: Grid) -> Quantized:
    """Quantize weights [N, K] with the clip of each group that loses least at the output, see :func:`clip.search`."""
    return clip.quantized(*clip.search(weights.float(), second_moment.float(), grid), grid)
