"""GPTQ: round one input channel at a time, and let the channels to come make up for the error.

For weights W [N, K] and inputs with second moment H = X^T X / tokens [K, K], the output error of integers that stand
for V is tr(E H E^T) with E = W - V. With H + damping = F D F^T, where F is upper triangular with ones on its diagonal
and D is diagonal, that is the sum of D_k |E_k + sum over j < k of E_j F[j, k]|^2, so each channel in turn is rounded as

    V_k = nearest(W_k + sum over j < k of E_j F[j, k])

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, in the form of Chee et al. 2023, arXiv:2307.13304, theorem
6, which needs no inverse of H. Channels of large inputs come first (activation order), and the scale of each group is
taken from the weights as they were, so that groups stay runs of consecutive inputs and an engine needs no index; that
is `static groups` of the authors' implementation. Scales come from the search of :mod:`.clip`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmc.errors import BuildError
from llmc.optimize.quantize import clip
from llmc.optimize.quantize.grid import Grid, Quantized

# Channels that errors of earlier ones reach in one matrix product.
LAZY_BLOCK = 64
# Added to the diagonal, as a share of its mean.
DAMPING = 0.01
# Where the factorization fails, damping grows tenfold up to this share of the mean diagonal.
SMALLEST_DAMPING, LARGEST_DAMPING = 1e-4, 1.0


@dataclass(frozen=True, eq=False)
class Inputs:
    """Knowledge of the inputs of linears that read the same: ``moment`` X^T X / tokens, float32 [K, K]."""

    moment: Tensor

    @cached_property
    def order(self) -> Tensor:
        """Channels in the order of rounding."""
        return self.moment.diagonal().argsort(descending=True, stable=True)

    @cached_property
    def factor(self) -> Tensor:
        return feedback_factor(self.moment, self.order)


def quantize(weights: Tensor, inputs: Inputs, grid: Grid, pruned: bool = False) -> Quantized:
    """Quantize weights [N, K] for ``inputs``. Channels that were never seen are rounded to nearest. With ``pruned``
    weights that are zero stay zero.

    Raises:
        BuildError: the second moment is not finite or cannot be factorized.
    """
    if not torch.isfinite(inputs.moment).all():
        raise BuildError("the second moment of a layer's inputs is not finite; calibrate with another text")
    weights = weights.float()
    scales, zeros = clip.search(weights, inputs.moment, grid)
    kept = weights.T[inputs.order] != 0 if pruned else None
    steps, width = _round_in_turn(weights, scales, zeros, grid, inputs, kept), weights.shape[1]
    values = steps + zeros.repeat_interleave(grid.width(width), 1)[:, :width]
    return Quantized(
        values.to(torch.int8).cpu().numpy(),
        scales.cpu().numpy(),
        grid,
        None if grid.symmetric else zeros.to(torch.int8).cpu().numpy(),
    )


def _round_in_turn(
    weights: Tensor, scales: Tensor, zeros: Tensor, grid: Grid, inputs: Inputs, kept: Tensor | None
) -> Tensor:
    """Steps q - z [N, K], 0 where ``kept`` [K, N], in the order of rounding, is false."""
    order, factor = inputs.order.tolist(), inputs.factor
    errors = weights.T[inputs.order]  # (K, N): a channel is contiguous, and becomes its error
    scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
    inverses, low, high = torch.where(scales == 0, 0, 1 / scales), grid.low - zeros, grid.high - zeros
    steps = torch.empty_like(errors)
    for start in range(0, len(order), LAZY_BLOCK):
        wanted = errors[start : start + LAZY_BLOCK].clone()
        wanted.addmm_(factor[:start, start : start + LAZY_BLOCK].T, errors[:start])
        for i, channel in enumerate(order[start : start + LAZY_BLOCK]):
            group = channel // grid.width(len(order))
            rounded = torch.mul(wanted[i], inverses[group], out=steps[channel]).round_().clamp_(low[group], high[group])
            if kept is not None:
                rounded *= kept[start + i]
            error = errors[start + i].addcmul_(rounded, scales[group], value=-1)
            wanted[i + 1 :].addr_(factor[start + i, start + i + 1 : start + LAZY_BLOCK], error)
    return steps.T


def feedback_factor(moment: Tensor, order: Tensor, damping: float = DAMPING) -> Tensor:
    """F of H + damping * mean diagonal = F D F^T, for H's channels in ``order``: upper, ones on its diagonal, [K, K].

    If H reversed is L L^T, then H = R R^T with R = L reversed, which is upper, and F is R over its diagonal.
    """
    backward = order.flip(0)
    turned = moment[backward[:, None], backward]
    diagonal = turned.diagonal()
    diagonal[diagonal == 0] = 1  # channels never seen
    mean = diagonal.mean()
    added = 0.0
    while damping <= LARGEST_DAMPING:
        diagonal += (damping - added) * mean
        lower, failed = torch.linalg.cholesky_ex(turned)
        if not failed:
            factor: Tensor = lower.div_(lower.diagonal().clone()).flip(0, 1)
            return factor
        added, damping = damping, max(10 * damping, SMALLEST_DAMPING)
    raise BuildError(
        f"the second moment of a layer's inputs is not positive definite, even with damping {added:g}; "
        "calibrate with more samples, or use scheme rtn"
    )
