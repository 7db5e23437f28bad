"""SmoothQuant: move part of the activations' range into the weights, where it costs less.

For inputs X [tokens, K] and weights W [N, K], X W^T = (X / s) (W s)^T for any positive s [K]. With

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

an outlier channel of X comes near the others, and alpha says how much of the range goes over. What precedes the linear
takes 1 / s, so inference does nothing more than before. Source: Xiao et al. 2022, arXiv:2211.10438, equation 4.
"""

import torch
from torch import Tensor

from llmc.errors import BuildError

# Weights and norms are stored in 16 bits at times: a factor beyond this would drive them out of float16's range.
LARGEST_SCALE = 1e4


def scales(activation_absmax: Tensor, weight_absmax: Tensor, *, alpha: float) -> Tensor:
    """Positive scales [K]: activations are to be divided by them, weights multiplied; 1 where either is all zero.

    Args:
        activation_absmax: largest magnitude of each input channel, [K].
        weight_absmax: largest magnitude of each column of all matrices that read the activation, [K].
        alpha: share of the range that moves, 0 ... 1; the paper takes 0.5, and 0.75 where outliers are large.
    """
    absmax, largest = activation_absmax.float(), weight_absmax.float()
    if not (torch.isfinite(absmax) & (absmax >= 0)).all():
        raise BuildError("an activation's range is NaN, infinite or negative; calibrate again with another text")
    factors = absmax.pow(alpha) / largest.pow(1 - alpha)
    alive = (absmax > 0) & (largest > 0)
    return torch.where(alive, factors, 1.0).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
