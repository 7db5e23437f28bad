"""Parts of a tower that sees."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float, cut
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import Norm
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site
from llmc.export.vision.shapes import PatchTowerConfig


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
