"""Normalisations."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export.blocks.linear import as_float


class RMSNorm(nn.Module):
    """Normalise runs of ``size`` values of the last dimension: the whole of it, or each head (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[0]
        runs = x if x.shape[-1] == size else x.view(*x.shape[:-1], -1, size)
        normed = functional.rms_norm(runs, (size,), as_float(self.weight), self.eps)
        return normed if runs is x else normed.flatten(-2)
