"""The tower of a model that sees: tiles in, rows of embeddings for its decoder out."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from llmc.export.blocks.linear import Linear
from llmc.export.blocks.mlp import ACTIVATIONS
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.vision import (
    JoinPatches,
    MergePatches,
    PatchEmbedding,
    PoolPatches,
    PositionTable,
    TowerLayer,
    WeighedPositions,
)
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


class GridTower(nn.Module):
    """One of grids of any shape, whose positions are weighed from those of a square."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm, width = NormConfig(config.eps, "layer", bias=True), config.width * config.merged**2
        self.patch_embedding = Linear(3 * config.patch**2, config.width, bias=True)
        self.position_embedding = WeighedPositions(config.side**2, config.width)
        self.layers = nn.ModuleList(TowerLayer(config, norm) for _ in range(config.layers))
        self.norm = Norm(config.width, norm)
        self.merge = JoinPatches(config.merged)
        self.connector_norm = Norm(width, NormConfig(1e-5, "layer", bias=True)) if config.projector_norm else None
        self.connector_hidden = Linear(width, config.projector_inner, bias=config.projector_bias)
        self.act_fn = ACTIVATIONS["gelu"]()
        self.connector = Linear(config.projector_inner, config.outputs, bias=config.projector_bias)

    def forward(self, pixels: Tensor, weights: Tensor) -> Tensor:
        """patches (1, P, 3 * patch²), square by square, weights (P, places) -> rows of embeddings (P / merged², N)."""
        x = self.position_embedding(self.patch_embedding(pixels), weights)
        for layer in self.layers:
            x = layer(x)
        x = self.merge(self.norm(x))
        x = x if self.connector_norm is None else self.connector_norm(x)
        rows: Tensor = self.connector(self.act_fn(self.connector_hidden(x))).flatten(0, 1)
        return rows


class _Root(nn.Module):
    """Gives the tower's modules names that no decoder has."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.vision = GridTower(config) if config.projector == "mlp" else Tower(config)

    def forward(self, *given: Tensor) -> Tensor:
        rows: Tensor = self.vision(*given)
        return rows


def build_tower(config: TowerConfig, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the tower, refer to its weights in the files of ``base``, and check the result."""
    given: tuple[Tensor, ...]
    axes: tuple[dict[int, torch.export.Dim], ...]
    size, names = torch.export.Dim("size", min=2), ("pixel_values", "position_weights")
    if config.projector == "mlp":
        patches = 3 * config.merged**2
        given = torch.zeros(1, patches, 3 * config.patch**2), torch.zeros(patches, config.side**2)
        axes, name = ({1: config.merged**2 * size}, {0: config.merged**2 * size}), "patches"
    else:
        given, axes, name = (torch.zeros(2, 3, config.tile, config.tile),), ({0: size},), "tiles"
    model = trace(lambda: _Root(config), tensors, given, (axes,))
    shape = model.graph.inputs[0].shape
    assert shape is not None
    name_dimensions(model.graph, {str(shape[next(iter(axes[0]))]): name})
    model.graph.outputs[0].name = "embeddings"
    for value, own in zip(model.graph.inputs, names, strict=False):
        value.name = own
    finish_graph(model, tensors, base, "tower")
    check_nodes(model, {("MatMul",): [linear.name for linear in config.linears]})
    check_onnx(model)
    return model
