"""The torch modules of towers: tiles or patches in, rows of embeddings for the decoder out."""

import torch
from torch import Tensor, nn

from llmc.bundle.model.experts import Activation
from llmc.export.blocks.linear import Linear
from llmc.export.blocks.mlp import ACTIVATIONS
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.rope import Rope
from llmc.export.vision.blocks import (
    MergePatches,
    PatchAttention,
    PatchEmbedding,
    PatchMerger,
    PlaceTable,
    PoolPatches,
    PositionTable,
    TowerLayer,
    TurnedAttention,
)
from llmc.export.vision.shapes import PatchTowerConfig, TowerConfig

# Of all norms and of the rotary embedding of towers over whole images. Source: transformers, qwen2_5_vl and qwen3_vl.
EPS, THETA = 1e-6, 10_000.0


class Tower(nn.Module):
    """A vision transformer, and what makes rows of its patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm = NormConfig(config.eps, "layer", bias=True)
        self.patch_embedding = PatchEmbedding(config.patch, config.width)
        self.position_embedding = PositionTable(config.side**2, config.width)
        self.layers = _make_layers(config, norm)
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


def _make_layers(config: TowerConfig, norm: NormConfig) -> nn.ModuleList:
    mlp = MlpConfig(inner=config.inner, activation="gelu_tanh", gated=False, bias=True)
    attentions = (PatchAttention(config.width, config.heads) for _ in range(config.layers))
    return nn.ModuleList(TowerLayer(attention, mlp, config.width, norm) for attention in attentions)


class GridTower(nn.Module):
    """One of grids of any shape, whose positions are weighed from those of a square."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm, self.wide = NormConfig(config.eps, "layer", bias=True), config.width * config.merged**2
        self.patch_embedding = Linear(3 * config.patch**2, config.width, bias=True)
        self.position_embedding = PlaceTable(config.side**2, config.width)
        self.layers = _make_layers(config, norm)
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
        self.rotary_emb = RotaryEmbedding(inverse_frequencies(make_rope(config)))
        activation: Activation = "silu" if config.gated else "gelu_tanh"
        mlp = MlpConfig(inner=config.inner, activation=activation, gated=config.gated, bias=True)
        windowed = [config.window > 0 and index not in config.whole for index in range(config.layers)]
        attentions = (TurnedAttention(config.width, config.heads, windowed=own) for own in windowed)
        self.layers = nn.ModuleList(TowerLayer(attention, mlp, config.width, norm) for attention in attentions)
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


class Root(nn.Module):
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


def make_rope(config: PatchTowerConfig) -> Rope:
    """Half of a head's pairs turn by the row of a patch, the others as fast by its column."""
    return Rope(config.width // config.heads // 2, THETA)
