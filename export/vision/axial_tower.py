"""The torch modules of towers that place patches by row and column."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.blocks.scale import Scale
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site
from llmc.export.vision.axial import BOUNDS, FEEDERS, HEAD_NORMS, PIXEL_NORMS, STANDARD, AxialTowerConfig

# Epsilon of the layer norms around the product with pixels. Source: transformers, gemma4_unified.
EPS = 1e-5


class AxialTable(nn.Module):
    """x (1, P, N), rows and columns (P, 2) -> x with a learned vector of each patch's column and of its row added."""

    def __init__(self, places: int, width: int, *, alternating: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * places, width), requires_grad=False)
        # Entries of columns and rows alternate, or those of all rows follow those of all columns.
        self.step, self.first_row = (2, 1) if alternating else (1, places)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        columns, rows = positions[:, 1] * self.step, positions[:, 0] * self.step + self.first_row
        by_column, by_row = (as_float(functional.embedding(entries, self.weight)) for entries in (columns, rows))
        return x + (by_column + by_row)


class ClippedLinear(Linear):
    """x (..., in) -> x W^T (..., out), both within learned bounds."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        for name in BOUNDS:
            self.register_parameter(name, nn.Parameter(torch.empty(1), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        (least_in, most_in, least_out, most_out) = (as_float(self.get_parameter(name)) for name in BOUNDS)
        held = torch.minimum(torch.maximum(x, least_in), most_in)
        return torch.minimum(torch.maximum(super().forward(held), least_out), most_out)


def _make_linear(config: AxialTowerConfig, inputs: int, outputs: int) -> Linear:
    return ClippedLinear(inputs, outputs) if config.clipped else Linear(inputs, outputs)


class AxialAttention(nn.Module):
    """Attention of all patches of an image to one another, whose heads are normalized and turn by row and column."""

    def __init__(self, config: AxialTowerConfig, norm: NormConfig) -> None:
        super().__init__()
        self.heads, width = config.heads, config.heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (_make_linear(config, config.width, width) for _ in range(3))
        self.o_proj = _make_linear(config, width, config.width)
        for name in HEAD_NORMS:
            self.add_module(name.rpartition(".")[2], Norm(config.head_dim, norm))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """x (1, P, N), cosines and sines (1, P, D/2) -> x."""
        q, k, v = (
            self.get_submodule(f"{part}_norm")(self.get_submodule(f"{part}_proj")(x)) for part in ("q", "k", "v")
        )
        q, k = (ops.turn_patches(part, *turns, self.heads) for part in (q, k))
        mixed: Tensor = self.o_proj(ops.patch_attention(q, k, v, self.heads, scale=1.0))
        return mixed


class AxialLayer(nn.Module):
    """A residual block with norms on both sides of attention and MLP."""

    def __init__(self, config: AxialTowerConfig, norm: NormConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.width, norm) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (Norm(config.width, norm) for _ in range(2))
        self.self_attn = AxialAttention(config, norm)
        mlp = MlpConfig(inner=config.inner, activation="gelu_tanh", gated=True)
        self.mlp = MLP(mlp, Site("mlp", 0, config.width, config.width), norm)
        for name in FEEDERS if config.clipped else ():
            sizes = (config.inner, config.width) if name == FEEDERS[2] else (config.width, config.inner)
            self.mlp.add_module(name.rpartition(".")[2], _make_linear(config, *sizes))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), turns))
        fed: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + fed


class AxialTower(nn.Module):
    """A tower over the patches of one image, square by square."""

    def __init__(self, config: AxialTowerConfig) -> None:
        super().__init__()
        self.config, norm, width = config, NormConfig(config.eps), config.width
        pixels, around = 3 * config.patch**2, NormConfig(EPS, "layer", bias=True)
        for name, size in zip(PIXEL_NORMS, (pixels, width, width), strict=True):
            self.add_module(name, Norm(size, around) if config.embeds_pixels else nn.Identity())
        self.patch_embedding = Linear(pixels, width, bias=config.embeds_pixels)
        self.position_embedding = AxialTable(config.places, width, alternating=config.embeds_pixels)
        if config.layers:
            self.rotary_emb = RotaryEmbedding(inverse_frequencies(config.rope))
        self.layers = nn.ModuleList(AxialLayer(config, norm) for _ in range(config.layers))
        self.scale = Scale(1.0 if config.embeds_pixels else width**0.5)
        for name in STANDARD if config.standardized else ():
            self.register_parameter(name, nn.Parameter(torch.empty(width), requires_grad=False))
        self.norm = Norm(width, norm)
        self.connector = Linear(width, config.outputs)

    def forward(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """pixels (P, K), rows and columns (P, 2) -> rows of embeddings (P / merged², N)."""
        before, within, behind = map(self.get_submodule, PIXEL_NORMS)
        x = behind(self.position_embedding(within(self.patch_embedding(before(pixels.unsqueeze(0)))), positions))
        if self.config.layers:
            angles = (positions.unsqueeze(-1).float() * self.rotary_emb.inv_freq).flatten(1).unsqueeze(0)
            turns = angles.cos(), angles.sin()
            for layer in self.layers:
                x = layer(x, turns)
            x = self.scale(x.view(1, -1, self.config.merged**2, self.config.width).mean(2))
        if self.config.standardized:
            bias, factor = (as_float(self.get_parameter(name)) for name in STANDARD)
            x = (x - bias) * factor
        rows: Tensor = self.connector(self.norm(x))[0]
        return rows
