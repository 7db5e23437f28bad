"""The torch modules of towers: tiles or patches in, rows of embeddings for the decoder out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.bundle.model.experts import Activation
from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float, cut
from llmc.export.blocks.mlp import ACTIVATIONS, MLP
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site
from llmc.export.vision.axial import AxialTowerConfig
from llmc.export.vision.axial_tower import AxialTower
from llmc.export.vision.llama import LlamaTowerConfig
from llmc.export.vision.llama_tower import LlamaTower
from llmc.export.vision.shapes import PatchTowerConfig, TowerConfig

# Epsilon of all norms of towers over whole images. Source: transformers, qwen2_5_vl and qwen3_vl.
EPS = 1e-6


class PatchEmbedding(Linear):
    """pixels (T, 3, H, W) -> a vector of each patch (T, P, width), row by row: a convolution whose kernels do not
    overlap is a product with the pixels of each."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__(3 * patch**2, width, bias=True)
        self.patch = patch

    def forward(self, pixels: Tensor) -> Tensor:
        (tiles, colors, height, width), patch = pixels.shape, self.patch
        patches = pixels.view(tiles, colors, height // patch, patch, width // patch, patch).permute(0, 2, 4, 1, 3, 5)
        return super().forward(patches.flatten(3).flatten(1, 2))


class PositionTable(nn.Module):
    """x (T, P, N) -> the same with a learned vector of each place added."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + as_float(self.weight)


class PatchAttention(nn.Module):
    """Attention of all patches of a tile to one another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(width, width, bias=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.o_proj(ops.patch_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.heads))
        return mixed


class TowerLayer(nn.Module):
    """A residual block with a norm before attention and before the MLP."""

    def __init__(self, attention: nn.Module, mlp: MlpConfig, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(width, norm) for _ in range(2))
        self.self_attn, self.mlp = attention, MLP(mlp, Site("mlp", 0, width, width), norm)

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        """x (T, P, N) and what attention reads beside it -> x."""
        x = x + self.self_attn(self.input_layernorm(x), *where)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class MergePatches(nn.Module):
    """x (T, P, N) -> the values of each square of patches side by side (T, P / merged², N * merged²)."""

    def __init__(self, side: int, merged: int) -> None:
        super().__init__()
        self.rows, self.merged = side // merged, merged

    def forward(self, x: Tensor) -> Tensor:
        squares = x.view(x.shape[0], self.rows, self.merged, self.rows, self.merged, x.shape[2])
        return squares.transpose(2, 3).flatten(3).flatten(1, 2)


class PoolPatches(MergePatches):
    """x (T, P, N) -> the means of each square of patches (T, P / merged², N)."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.view(x.shape[0], self.rows, self.merged, self.rows, self.merged, x.shape[2])
        return squares.mean((2, 4)).flatten(1, 2)


# ------------------------------------------------------------------------------------- towers for grids of any shape


class TakeRows(nn.Module):
    """x (N, W), indices -> (..., W), any row for -1; a module only so that its node in the graph has a name."""

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return functional.embedding(indices, x)


class PlaceTable(nn.Module):
    """x (1, P, N) -> the same with learned vectors added: of each patch C entries of a table, each with a weight."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places, width), requires_grad=False)

    def forward(self, x: Tensor, corners: Tensor, weights: Tensor) -> Tensor:
        """``corners`` and ``weights`` (C, P)."""
        return x + (as_float(functional.embedding(corners, self.weight)) * weights.unsqueeze(-1)).sum(0)


class TurnedAttention(nn.Module):
    """Attention of patches that are turned by where they are, to all of their image or of their window."""

    def __init__(self, width: int, heads: int, *, windowed: bool) -> None:
        super().__init__()
        self.width, self.heads, self.windowed = width, heads, windowed
        self.qkv, self.o_proj = Linear(width, 3 * width, bias=True), Linear(width, width, bias=True)
        self.to_windows, self.from_windows = TakeRows(), TakeRows()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], windows: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (1, P, N), cosines and sines (1, P, D/2); if some layers have windows the patches of each (W, L), -1 after
        them, and each patch's place in the windows (P) -> x."""
        q, k, v = cut(self.qkv(x), self.width, self.width)
        q, k = (ops.turn_patches(part, *turns, self.heads) for part in (q, k))
        if not self.windowed or windows is None:
            whole: Tensor = self.o_proj(ops.patch_attention(q, k, v, self.heads))
            return whole
        slots, places = windows
        q, k, v = (self.to_windows(part[0], slots) for part in (q, k, v))
        seen = (slots >= 0).unsqueeze(1).unsqueeze(1).expand(-1, -1, slots.shape[1], -1)
        mixed = ops.patch_attention(q, k, v, self.heads, seen)
        apart: Tensor = self.o_proj(self.from_windows(mixed.flatten(0, 1), places).unsqueeze(0))
        return apart


class PatchMerger(nn.Module):
    """x (1, P, N), squares of patches one after the other -> rows (P / merged², outputs), whose norm is of each patch
    or of each square."""

    def __init__(self, config: PatchTowerConfig, norm: NormConfig, *, of_squares: bool) -> None:
        super().__init__()
        self.wide = config.width * config.merged**2
        self.norm = Norm(self.wide if of_squares else config.width, norm)
        self.fc1, self.act_fn = Linear(self.wide, self.wide, bias=True), nn.GELU()
        self.fc2, self.of_squares = Linear(self.wide, config.outputs, bias=True), of_squares

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x.view(1, -1, self.wide)) if self.of_squares else self.norm(x).view(1, -1, self.wide)
        rows: Tensor = self.fc2(self.act_fn(self.fc1(squares)))[0]
        return rows


class Tower(nn.Module):
    """A vision transformer, and what makes rows of its patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm = NormConfig(config.eps, "layer", bias=True)
        self.patch_embedding = PatchEmbedding(config.patch, config.width)
        self.position_embedding = PositionTable(config.side**2, config.width)
        self.layers = make_layers(config.layers, config.width, config.heads, config.inner, "gelu_tanh", norm)
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


def make_layers(
    layers: int, width: int, heads: int, inner: int, activation: Activation, norm: NormConfig
) -> nn.ModuleList:
    """The layers of a transformer without gates, as :func:`llmc.export.vision.shapes.list_layers` lists them."""
    mlp = MlpConfig(inner=inner, activation=activation, gated=False, bias=True)
    attentions = (PatchAttention(width, heads) for _ in range(layers))
    return nn.ModuleList(TowerLayer(attention, mlp, width, norm) for attention in attentions)


class GridTower(nn.Module):
    """One of grids of any shape, whose positions are weighed from those of a square."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        norm, self.wide = NormConfig(config.eps, "layer", bias=True), config.width * config.merged**2
        self.patch_embedding = Linear(3 * config.patch**2, config.width, bias=True)
        self.position_embedding = PlaceTable(config.side**2, config.width)
        self.layers = make_layers(config.layers, config.width, config.heads, config.inner, "gelu_tanh", norm)
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
        self.rotary_emb = RotaryEmbedding(inverse_frequencies(config.rope))
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
        deep = list[Tensor]()
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, windows)
            if index in self.config.deep:
                deep.append(self.deep[self.config.deep.index(index)](x))
        return torch.cat((self.merger(x), *deep), -1)


class Root(nn.Module):
    """Gives the tower's modules names that no decoder has."""

    def __init__(self, config: TowerConfig | PatchTowerConfig | AxialTowerConfig) -> None:
        super().__init__()
        self.vision: nn.Module
        if isinstance(config, AxialTowerConfig):
            self.vision = AxialTower(config)
        elif isinstance(config, LlamaTowerConfig):
            self.vision = LlamaTower(config)
        elif isinstance(config, PatchTowerConfig):
            self.vision = PatchTower(config)
        else:
            self.vision = (GridTower if config.projector == "mlp" else Tower)(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        rows: Tensor = self.vision(*inputs)
        return rows
