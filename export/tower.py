"""The tower of a model that sees: tiles or patches in, rows of embeddings for its decoder out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from llmc.export.blocks.linear import Linear
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.vision import (
    MergePatches,
    PatchEmbedding,
    PatchMerger,
    PlaceTable,
    PositionTable,
    TowerLayer,
    TurnedLayer,
)
from llmc.export.config import NormConfig, Rope
from llmc.export.graph import check_nodes, check_onnx, finish_graph, name_dimensions, trace
from llmc.export.sources.safetensors import StoredTensor
from llmc.export.vision import PatchTowerConfig, TowerConfig
from llmc.inventory import TOWER

# Of all norms and of the rotary embedding of towers over whole images. Source: transformers, qwen2_5_vl and qwen3_vl.
EPS, THETA = 1e-6, 10_000.0
# Sizes to trace with, all different.
_ROWS, _WINDOWS = 15, 3


class Tower(nn.Module):
    """A vision transformer, and what makes rows of its patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm = NormConfig(config.eps, "layer", bias=True)
        self.patch_embedding = PatchEmbedding(config.patch, config.width)
        self.position_embedding = PositionTable(config.side**2, config.width)
        self.layers = nn.ModuleList(TowerLayer(config, norm) for _ in range(config.layers))
        self.norm = Norm(config.width, norm)
        self.merge = MergePatches(config.side, config.merged)
        self.connector = Linear(config.width * config.merged**2, config.outputs)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (T, 3, H, W) -> rows of embeddings (T * tokens, N)."""
        x = self.position_embedding(self.patch_embedding(pixels))
        for layer in self.layers:
            x = layer(x)
        rows: Tensor = self.connector(self.merge(self.norm(x))).flatten(0, 1)
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
        """pixels (P, K), rows and columns (P, 2); with a table of positions four entries of it for each patch and their
        weights (4, P); with windows the patches of each (W, L) and where in these each lies (P) -> rows (P / merged²,
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
        self.vision = Tower(config) if isinstance(config, TowerConfig) else PatchTower(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        rows: Tensor = self.vision(*inputs)
        return rows


def _turns(config: PatchTowerConfig) -> Rope:
    """Half of a head's pairs turn by the row of a patch, the others as fast by its column."""
    return Rope(config.width // config.heads // 2, THETA)


def build_tower(config: TowerConfig | PatchTowerConfig, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the tower, refer to its weights in the files of ``base``, and check the result."""
    samples = _sample_tiles(config) if isinstance(config, TowerConfig) else _sample_patches(config)
    inputs, shapes = ([each[part] for each in samples.values()] for part in (0, 1))
    model = trace(lambda: _Root(config), tensors, tuple(inputs), (tuple(shapes),))
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


# Inputs by name, each with the names of its dimensions that are free.
_Samples = dict[str, tuple[Tensor, dict[int, Any]]]


def _sample_tiles(config: TowerConfig) -> _Samples:
    return {"pixel_values": (torch.zeros(2, 3, config.tile, config.tile), {0: torch.export.Dim("tiles")})}


def _sample_patches(config: PatchTowerConfig) -> _Samples:
    square = config.merged**2
    patches, count = square * torch.export.Dim("rows"), square * _ROWS
    integers = torch.zeros(count, 2, dtype=torch.int64)
    found: _Samples = {
        "pixel_values": (torch.zeros(count, 3 * config.frames * config.patch**2), {0: patches}),
        "positions": (integers, {0: patches}),
    }
    if config.places:
        found["corners"] = integers.new_zeros(4, count), {1: patches}
        found["corner_weights"] = torch.zeros(4, count), {1: patches}
    if config.window:
        slots = integers.new_zeros(_WINDOWS, square * config.window**2)
        found["windows"] = slots, {0: torch.export.Dim("windows")}
        found["window_places"] = integers.new_zeros(count), {0: patches}
    return found


def _name_dimensions(graph: ir.Graph, samples: _Samples) -> None:
    names = {}
    for value, name in zip(graph.inputs, samples, strict=True):
        for axis in samples[name][1]:
            assert value.shape is not None
            free = {"pixel_values": "patches", "windows": "windows"}.get(name)
            if free is not None:
                names[str(value.shape[axis])] = "tiles" if "positions" not in samples else free
    name_dimensions(graph, names)
