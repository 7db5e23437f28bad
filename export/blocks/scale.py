"""Scaling by a factor of the configuration, and softcaps."""

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """x -> factor * x, and no node in the graph where the factor is one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor == 1 else x * self.factor


class Softcap(nn.Module):
    """x -> cap * tanh(x / cap), which stays between -cap and cap; no node in the graph where the cap is zero."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return x if self.cap == 0 else torch.tanh(x / self.cap) * self.cap
