"""Feed-forward parts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from llmc.export.blocks.linear import Linear
from llmc.export.blocks.scale import Scale
from llmc.export.config import Activation, MlpConfig


class SiLU(nn.Module):
    """x * sigmoid(x), written so that the graph has two standard nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class ReLU2(nn.Module):
    """relu(x) squared (arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        positive = torch.relu(x)
        return positive * positive


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "silu": SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu2": ReLU2,
}


class MLP(nn.Module):
    """Feed-forward: down(act(gate x) * up x) if gated, else down(act(up x))."""

    def __init__(self, config: MlpConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, config.inner, bias=config.bias) if config.gated else None
        self.up_proj = Linear(hidden_size, config.inner, bias=config.bias)
        self.down_proj = Linear(config.inner, hidden_size, bias=config.bias)
        self.act_fn = ACTIVATIONS[config.activation]()
        self.gate_scale, self.scale = Scale(config.gate_scale), Scale(config.scale)
        self.weight_proj = Linear(hidden_size, 1) if config.weighed else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            down: Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        else:
            down = self.down_proj(self.act_fn(self.gate_scale(self.gate_proj(x))) * self.up_proj(x))
        down = self.scale(down)
        return down if self.weight_proj is None else down * torch.sigmoid(self.weight_proj(x))
