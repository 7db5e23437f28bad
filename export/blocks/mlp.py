"""Feed-forward parts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.bundle.model.experts import Activation
from llmc.export.blocks.linear import as_float
from llmc.export.blocks.part import PartModule
from llmc.export.blocks.scale import Scale
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site


class SiLU(nn.Module):
    """x * sigmoid(x), written so that the graph has two standard nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class ReLU2(nn.Module):
    """relu(x) squared (arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        positive = torch.relu(x)
        return positive * positive


class XIELU(nn.Module):
    """softplus(alpha_p) * x^2 + beta * x above zero; below it (beta + softplus(alpha_n)) * (e^x - 1 - x) + beta * x
    (arXiv 2411.13010)."""

    def forward(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor) -> Tensor:
        above, bend = torch.relu(x), beta + functional.softplus(alpha_n)
        below = x - above
        return functional.softplus(alpha_p) * above * above + bend * (torch.exp(below) - 1 - below) + beta * x


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "silu": SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "relu2": ReLU2,
    "xielu": XIELU,
}


class MLP(PartModule):
    """Feed-forward: down(act(gate x) * up x) if gated, else down(act(up x))."""

    def __init__(self, config: MlpConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, norm)
        self.config, self.act_fn = config, ACTIVATIONS[config.activation]()
        self.gate_scale, self.scale = Scale(config.gate_scale), Scale(config.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.gated:
            inner = self._activate(self.gate_scale(self.gate_proj(x))) * self.up_proj(x)
        else:
            inner = self._activate(self.up_proj(x))
        down: Tensor = self.scale(self.down_proj(inner))
        return down * torch.sigmoid(self.weight_proj(x)) if self.config.weighed else down

    def _activate(self, x: Tensor) -> Tensor:
        learned = [as_float(getattr(self, name)) for name in self.config.learned]
        y: Tensor = self.act_fn(x, *learned)
        return y
