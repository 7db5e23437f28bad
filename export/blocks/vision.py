"""Parts of a tower that sees."""

import torch
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import Norm
from llmc.export.config import MlpConfig, NormConfig
from llmc.export.vision import TowerConfig


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


class WeighedPositions(nn.Module):
    """x (1, P, N), weights (P, places) -> the same with the learned vectors of all places, weighed, added."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places, width), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x + ops.weigh_rows(weights, as_float(self.weight))


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
    """A residual block with a layer norm before attention and before the MLP."""

    def __init__(self, config: TowerConfig, norm: NormConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.width, norm) for _ in range(2))
        self.self_attn = PatchAttention(config.width, config.heads)
        self.mlp = MLP(MlpConfig(config.inner, "gelu_tanh", gated=False, bias=True), config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
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


class JoinPatches(nn.Module):
    """x (1, P, N), square by square -> the values of each square side by side (1, P / merged², N * merged²)."""

    def __init__(self, merged: int) -> None:
        super().__init__()
        self.squared = merged**2

    def forward(self, x: Tensor) -> Tensor:
        return x.view(1, -1, self.squared * x.shape[2])


class PoolPatches(MergePatches):
    """x (T, P, N) -> the means of each square of patches (T, P / merged², N)."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.view(x.shape[0], self.rows, self.merged, self.rows, self.merged, x.shape[2])
        return squares.mean((2, 4)).flatten(1, 2)
