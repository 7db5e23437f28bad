"""Feed-forward parts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from llmc.bundle.model.experts import Activation
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


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "silu": SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu2": ReLU2,
}


class MLP(PartModule):
    """Feed-forward: down(act(gate x) * up x) if gated, else down(act(up x))."""

    def __init__(self, config: MlpConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, norm)
        self.config, self.act_fn = config, ACTIVATIONS[config.activation]()
        self.gate_scale, self.scale = Scale(config.gate_scale), Scale(config.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.gated:
            inner = self.act_fn(self.gate_scale(self.gate_proj(x))) * self.up_proj(x)
        else:
            inner = self.act_fn(self.up_proj(x))
        down: Tensor = self.scale(self.down_proj(inner))
        return down * torch.sigmoid(self.weight_proj(x)) if self.config.weighed else down
