"""The common part of modules: what their description lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.linear import add_linears
from llmc.export.blocks.norm import Norm
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Part, Site

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """Inputs of a call that all layers read."""

    lengths: Tensor  # (B) of the cache; without one of the rows; (B, S) positions if another layer's cache is read
    ropes: Sequence[Tensor]  # frequencies (R/2) of each of the decoder's ropes
    new_lengths: Tensor | None = None  # (B) new tokens that count, if some cache is a state
    shown: ops.Shown = ops.PLAIN  # how positions and sight differ from those of text
    bias: Tensor | None = None  # (1, H, S, S) of the products of queries and keys


class PartModule(nn.Module):
    """A module with the linears, norms and tensors that its part of a layer lists, under the names there."""

    def __init__(self, part: Part, site: Site, norm: NormConfig) -> None:
        super().__init__()
        add_linears(self, part.list_linears(site))
        for name, size in part.list_norms(site.hidden):
            self.add_module(name, Norm(size, norm))
        for name, shape in part.list_shapes(site.hidden).items():
            if "." not in name:  # others belong to modules of their own
                self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        """A linear, norm or tensor that the part lists."""
        return super().__getattr__(name)

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """``x`` through the norm with this name, if there is one."""
        return self.get_submodule(name)(x) if name in self._modules else x
