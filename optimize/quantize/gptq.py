"""GPTQ: round one input channel at a time, and let the channels to come make up for the error.

For weights W [N, K] and inputs with second moment H = X^T X / tokens [K, K], the output error of a change D of W is
tr(D H D^T). Channels i are rounded in turn; what rounding w_i changed, e = w_i - q_i, is spread over the channels that
are still free, with U the upper Cholesky factor of (H + damping)^-1 = U^T U:

    W[:, j] -= e * U[i, j] / U[i, i]        j > i

which is the least-squares answer. Updates beyond a block of channels are applied once per block. Source: Frantar et al.
2022, arXiv:2210.17323, algorithm 1. Channels of large inputs come first (activation order), and the scale of each group
is taken from the weights as they were, so that groups stay runs of consecutive inputs and an engine needs no index;
that is `static groups` of the authors' implementation. Scales come from the search of :mod:`.clip`, and at last from
least squares over all groups of a row for the integers chosen.
"""

import torch
from torch import Tensor

from llmc.errors import BuildError
from llmc.optimize.quantize import clip
from llmc.optimize.quantize.grid import Grid, Quantized

# Channels whose updates to later ones are gathered into one matrix product.
LAZY_BLOCK = 128
# Added to the diagonal, as a share of its mean.
DAMPING = 0.01
# Where the factorization fails, damping grows tenfold up to this share of the mean diagonal.
SMALLEST_DAMPING, LARGEST_DAMPING = 1e-4, 1.0


def quantize(weights: Tensor, second_moment: Tensor, grid: Grid) -> Quantized:
    """Quantize weights [N, K] for inputs with ``second_moment`` X^T X / tokens, float32 [K, K].

    Channels that were never seen are rounded to nearest.

    Raises:
        BuildError: the second moment is not finite or cannot be factorized.
    """
    weights, moment = weights.float(), second_moment.float()
    _, scales, zeros = clip.search(weights, moment, grid)
    order = moment.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moment[order][:, order])
    steps = torch.empty_like(weights)
    steps[:, order] = _round_in_turn(weights[:, order], scales, zeros, grid, order, factor)
    return clip.make_quantized(steps, scales, zeros, grid)


def _round_in_turn(weights: Tensor, scales: Tensor, zeros: Tensor, grid: Grid, order: Tensor, factor: Tensor) -> Tensor:
    """Steps q - z [N, K] of weights whose channels are in the order of rounding."""
    left = weights.T.contiguous()  # (K, N): a channel is contiguous, and becomes its steps
    groups = (order // grid.width(len(left))).tolist()
    for start in range(0, len(left), LAZY_BLOCK):
        stop, errors = min(start + LAZY_BLOCK, len(left)), []
        for i in range(start, stop):
            scale, zero = scales[:, groups[i]], zeros[:, groups[i]]
            steps = clip.nearest(left[i], scale, zero, grid)
            errors.append((left[i] - steps * scale) / factor[i, i])
            left[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[-1], alpha=-1)
            left[i] = steps
        left[stop:].addmm_(factor[start:stop, stop:].T, torch.stack(errors), alpha=-1)
    return left.T


def inverse_factor(moment: Tensor, damping: float = DAMPING) -> Tensor:
    """The upper Cholesky factor U of (H + damping * mean diagonal)^-1 = U^T U, float32 [K, K].

    If H reversed is L L^T, then H = R R^T with R = L reversed, which is upper, and U = R^-1; so the inverse of H, the
    part that float32 would suffer from, is never formed.
    """
    reversed_moment = moment.flip(0, 1)
    diagonal = reversed_moment.diagonal()
    diagonal[diagonal == 0] = 1  # channels never seen
    mean = diagonal.mean()
    added = 0.0
    while damping <= LARGEST_DAMPING:
        diagonal += (damping - added) * mean
        lower, failed = torch.linalg.cholesky_ex(reversed_moment)
        if not failed:
            eye = torch.eye(len(lower), device=lower.device)
            factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return factor
        added, damping = damping, max(10 * damping, SMALLEST_DAMPING)
    raise BuildError(
        f"the second moment of a layer's inputs is not positive definite, even with damping {added:g}; "
        "calibrate with more samples, or use scheme rtn"
    )
