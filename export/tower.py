"""The tower of a model that sees: tiles or patches in, rows of embeddings for its decoder out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from llmc.bundle.model.vision import TOWER
from llmc.export.blocks.linear import Linear
from llmc.export.blocks.mlp import ACTIVATIONS
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.vision import (
    MergePatches,
    PatchEmbedding,
    PatchMerger,
    PlaceTable,
    PoolPatches,
    PositionTable,
    TowerLayer,
    TurnedLayer,
)
from llmc.export.config import NormConfig, Rope
from llmc.export.graph import check_nodes, check_onnx, finish_graph, name_dimensions, trace
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.vision import PatchTowerConfig, TowerConfig

# Of all norms and of the rotary embedding of towers over whole images. Source: transformers, qwen2_5_vl and qwen3_vl.
EPS, THETA = 1e-6, 10_000.0
# Sizes to trace with, all different.
_ROWS, _WINDOWS, _CORNERS = 15, 3, 5


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
        norm, self.wide = NormConfig(config.eps, "layer", bias=True), config.width * config.merged**2
        self.patch_embedding = Linear(3 * config.patch**2, config.width, bias=True)
        self.position_embedding = PlaceTable(config.side**2, config.width)
        self.layers = nn.ModuleList(TowerLayer(config, norm) for _ in range(config.layers))
        self.norm = Norm(config.width, norm)
        self.connector_norm = Norm(self.wide, NormConfig(1e-5, "layer", bias=True)) if config.projector_norm else None
        self.connector_hidden = Linear(self.wide, config.projector_inner, bias=config.projector_bias)
        self.act_fn = ACTIVATIONS["gelu"]()
        self.connector = Linear(config.projector_inner, config.outputs, bias=config.projector_bias)

    def forward(self, pixels: Tensor, corners: Tensor, weights: Tensor) -> Tensor:
        """patches (P, 3 * patch²), square by square, C entries of the table of positions for each and their weights
        (C, P) -> rows of embeddings (P / merged², N)."""
        x = self.position_embedding(self.patch_embedding(pixels).unsqueeze(0), corners, weights)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).view(1, -1, self.wide)
        x = x if self.connector_norm is None else self.connector_norm(x)
        rows: Tensor = self.connector(self.act_fn(self.connector_hidden(x))).flatten(0, 1)
        return rows


class PatchTower(nn.Module):
    """A vision transformer over the patches of one image, square by square, and what makes rows of them."""

    def __init__(self, config: PatchTowerConfig) -> None:
        super().__init__()
        self.config = config
        norm = NormConfig(EPS, config.norm, bias=config.norm == "layer")
        pixels = 3 * config.frames * config.patch**2
        self.patch_embedding = Linear(pixels, config.width, bias=config.embedding_bias)
        self.position_embedding = PlaceTable(config.places**2, config.width) if config.places else None
        self.rotary_emb = RotaryEmbedding(inverse_frequencies(_turns(config)))
        windowed = [config.window > 0 and index not in config.whole for index in range(config.layers)]
        self.layers = nn.ModuleList(TurnedLayer(config, norm, own) for own in windowed)
        self.deep = nn.ModuleList(PatchMerger(config, norm, of_squares=True) for _ in config.deep)
        self.merger = PatchMerger(config, norm, of_squares=False)

    def forward(self, pixels: Tensor, positions: Tensor, *more: Tensor) -> Tensor:
        """pixels (P, K), rows and columns (P, 2); with a table of positions C entries of it for each patch and their
        weights (C, P); with windows the patches of each (W, L) and where in these each lies (P) -> rows (P / merged²,
        N)."""
        x = self.patch_embedding(pixels).unsqueeze(0)
        if self.position_embedding is not None:
            x = self.position_embedding(x, *more[:2])
        angles = (positions.unsqueeze(-1).float() * self.rotary_emb.inv_freq).flatten(1).unsqueeze(0)
        turns = angles.cos(), angles.sin()
        windows = (more[-2], more[-1]) if self.config.window else None
        found = list[Tensor]()
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, windows)
            if index in self.config.deep:
                found.append(self.deep[self.config.deep.index(index)](x))
        return torch.cat((self.merger(x), *found), -1)


class _Root(nn.Module):
    """Gives the tower's modules names that no decoder has."""

    def __init__(self, config: TowerConfig | PatchTowerConfig) -> None:
        super().__init__()
        self.vision: nn.Module
        if isinstance(config, PatchTowerConfig):
            self.vision = PatchTower(config)
        else:
            self.vision = (GridTower if config.projector == "mlp" else Tower)(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        rows: Tensor = self.vision(*inputs)
        return rows


def _turns(config: PatchTowerConfig) -> Rope:
    """Half of a head's pairs turn by the row of a patch, the others as fast by its column."""
    return Rope(config.width // config.heads // 2, THETA)


def build_tower(config: TowerConfig | PatchTowerConfig, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the tower, refer to its weights in the files of ``base``, and check the result."""
    samples = _sample_inputs(config)
    shapes = tuple({axis: dim for axis, (_, dim) in free.items()} for _, free in samples.values())
    inputs = tuple(tensor for tensor, _ in samples.values())
    model = trace(lambda: _Root(config), tensors, inputs, (shapes,), decompose=True)
    if isinstance(config, PatchTowerConfig):
        name = f"{TOWER}.rotary_emb.inv_freq"
        model.graph.initializers[name].const_value = ir.tensor(inverse_frequencies(_turns(config)), name=name)
    _name_dimensions(model.graph, samples)
    for value, name in zip(model.graph.inputs, samples, strict=True):
        value.name = name
    model.graph.outputs[0].name = "embeddings"
    finish_graph(model, tensors, base, "tower")
    check_nodes(model, {("MatMul",): [linear.name for linear in config.linears]})
    check_onnx(model)
    return model


# Inputs by name, each with the names and sizes of its dimensions that are free.
_Samples = dict[str, tuple[Tensor, dict[int, tuple[str, Any]]]]


def _sample_inputs(config: TowerConfig | PatchTowerConfig) -> _Samples:
    dim = torch.export.Dim
    if isinstance(config, TowerConfig) and config.projector != "mlp":
        return {"pixel_values": (torch.zeros(2, 3, config.tile, config.tile), {0: ("tiles", dim("tiles"))})}
    square = config.merged**2
    patches, count = ("patches", square * dim("rows")), square * _ROWS
    integers = torch.zeros(count, 2, dtype=torch.int64)
    found: _Samples = {"pixel_values": (torch.zeros(count, config.linears[0].inputs), {0: patches})}
    if isinstance(config, PatchTowerConfig):
        found["positions"] = integers, {0: patches}
    if isinstance(config, TowerConfig) or config.places:
        free = {0: ("corners", dim("corners")), 1: patches}
        found["corners"] = integers.new_zeros(_CORNERS, count), free
        found["corner_weights"] = torch.zeros(_CORNERS, count), free
    if isinstance(config, PatchTowerConfig) and config.window:
        slots = integers.new_zeros(_WINDOWS, square * config.window**2)
        found["windows"] = slots, {0: ("windows", dim("windows"))}
        found["window_places"] = integers.new_zeros(count), {0: patches}
    return found


def _name_dimensions(graph: ir.Graph, samples: _Samples) -> None:
    names = dict[str, str]()
    for value, (_, free) in zip(graph.inputs, samples.values(), strict=True):
        assert value.shape is not None
        names |= {str(value.shape[axis]): name for axis, (name, _) in free.items()}
    name_dimensions(graph, names)
