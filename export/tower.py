"""The tower of a model that sees: tiles in, rows of embeddings for its decoder out."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from llmc.export.blocks.linear import Linear
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.vision import MergePatches, PatchEmbedding, PoolPatches, PositionTable, TowerLayer
from llmc.export.config import NormConfig
from llmc.export.graph import check_nodes, check_onnx, finish_graph, name_dimensions, trace
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.vision import TowerConfig


class Tower(nn.Module):
    """A vision transformer, and what makes rows of its patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm = NormConfig(config.eps, "layer", bias=True)
        self.patch_embedding = PatchEmbedding(config.patch, config.width)
        self.position_embedding = PositionTable(config.side**2, config.width)
        self.layers = nn.ModuleList(TowerLayer(config, norm) for _ in range(config.layers))
        self.norm = Norm(config.width, norm)
        pools = config.projector == "pool"
        self.merge = (PoolPatches if pools else MergePatches)(config.side, config.merged)
        self.connector_norm = Norm(config.width, NormConfig(config.eps)) if pools else nn.Identity()
        self.connector = Linear(config.linears[-1].inputs, config.outputs)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (T, 3, H, W) -> rows of embeddings (T * tokens, N)."""
        x = self.position_embedding(self.patch_embedding(pixels))
        for layer in self.layers:
            x = layer(x)
        rows: Tensor = self.connector(self.connector_norm(self.merge(self.norm(x)))).flatten(0, 1)
        return rows


class _Root(nn.Module):
    """Gives the tower's modules names that no decoder has."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.vision = Tower(config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        rows: Tensor = self.vision(pixel_values)
        return rows


def build_tower(config: TowerConfig, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the tower, refer to its weights in the files of ``base``, and check the result."""
    tiles, pixels = torch.export.Dim("tiles"), torch.zeros(2, 3, config.tile, config.tile)
    model = trace(lambda: _Root(config), tensors, (pixels,), ({0: tiles},))
    (taken,), (made,) = model.graph.inputs, model.graph.outputs
    assert taken.shape is not None
    name_dimensions(model.graph, {str(taken.shape[0]): "tiles"})
    taken.name, made.name = "pixel_values", "embeddings"
    finish_graph(model, tensors, base, "tower")
    check_nodes(model, {("MatMul",): [linear.name for linear in config.linears]})
    check_onnx(model)
    return model
