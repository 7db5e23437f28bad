"""Normalisations."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export.blocks.linear import as_float
from llmc.export.parts.norm import NormConfig


class Norm(nn.Module):
    """Normalise groups of ``size`` values of the last dimension (all of it, or each head) by their root mean square
    (arXiv 1910.07467) or as layer normalisation (arXiv 1607.06450)."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[0]
        runs = x if x.shape[-1] == size else x.view(*x.shape[:-1], -1, size)
        normed = self._normalize(runs, (size,))
        return normed if runs is x else normed.flatten(-2)

    def _normalize(self, x: Tensor, shape: tuple[int]) -> Tensor:
        x, weight, eps = as_float(x), as_float(self.weight), self.config.eps
        if self.config.kind == "rms":
            return functional.rms_norm(x, shape, weight, eps)
        return functional.layer_norm(x, shape, weight, None if self.bias is None else as_float(self.bias), eps)
