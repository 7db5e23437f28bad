"""The common part of modules: what their description lists."""

import torch
from torch import Tensor, nn

from llmc.export.blocks.linear import add_linears
from llmc.export.blocks.norm import Norm
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Part, Site


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

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """``x`` through the norm with this name, if there is one."""
        return self.get_submodule(name)(x) if name in self._modules else x
