"""2:4 structured pruning: of every four consecutive inputs of an output, the two least important weights become zero.

Importance is |w| (magnitude) or |w_nk| * |X_k|, the weight times the norm of its input channel over the calibration
samples (Wanda: Sun et al. 2023, arXiv:2306.11695, equation 1). The pattern is that of sparse tensor cores (Mishra et
al. 2021, arXiv:2104.08378). Masks [N, K] are true where a weight is kept; quantization keeps the zeros.
"""

import torch
from torch import Tensor

# Weights per group, and how many of them stay.
GROUP, KEPT = 4, 2


def mask(weights: Tensor, norms: Tensor | None = None) -> Tensor:
    """Keep the two of every four weights [N, K] that matter most, where given for inputs with these norms [K].

    The mask is bool [N, K]. A common factor of all norms changes nothing. Of equals the first is kept; what is left of
    a row whose length is no multiple of four is kept whole.
    """
    importance = weights.abs() if norms is None else weights.abs() * norms
    rows, inputs = importance.shape
    whole = inputs - inputs % GROUP
    kept = torch.ones(rows, inputs, dtype=torch.bool, device=importance.device)
    groups = importance[:, :whole].reshape(rows, -1, GROUP)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., KEPT:], True)
    kept[:, :whole] = ~dropped.reshape(rows, whole)
    return kept
