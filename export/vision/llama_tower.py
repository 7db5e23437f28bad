"""The torch modules of towers whose layers are Llama's."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float, cut
from llmc.export.blocks.mlp import MLP
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding, inverse_frequencies
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site
from llmc.export.vision.llama import LlamaTowerConfig

Turns = tuple[Tensor, Tensor]


class LlamaPatchAttention(nn.Module):
    """Attention of all patches of an image to one another, turned by where they are."""

    def __init__(self, config: LlamaTowerConfig, norm: NormConfig) -> None:
        super().__init__()
        width, head_dim = config.width, config.width // config.heads
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.q_proj, self.o_proj = (Linear(width, width) for _ in range(2))
        self.k_proj, self.v_proj = (Linear(width, self.kv_heads * head_dim) for _ in range(2))
        self.q_norm, self.k_norm = (Norm(head_dim, norm) if config.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, turns: Turns, _: Tensor | None) -> Tensor:
        """x (1, P, N), cosines and sines (1, P, D/2) -> x."""
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        q, k = ops.turn_patches(q, *turns, self.heads), ops.turn_patches(k, *turns, self.kv_heads)
        k, v = self._repeat(k), self._repeat(self.v_proj(x))
        mixed: Tensor = self.o_proj(ops.patch_attention(q, k, v, self.heads))
        return mixed

    def _repeat(self, x: Tensor) -> Tensor:
        """x (1, P, KV * D) -> each head for its group of queries (1, P, H * D)."""
        groups = self.heads // self.kv_heads
        if groups == 1:
            return x
        apart = x.view(1, -1, self.kv_heads, 1, x.shape[2] // self.kv_heads)
        return apart.expand(-1, -1, -1, groups, -1).flatten(2)


class PatchConv(nn.Module):
    """after * conv(before * x), of which one linear makes all three; each channel's patches are weighed by where they
    lie around a patch."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Linear(width, 3 * width), Linear(width, width)
        self.width, self.kernel = width, kernel
        self.weight = nn.Parameter(torch.empty(width, 1, kernel, kernel), requires_grad=False)

    def forward(self, x: Tensor, _: Turns, neighbors: Tensor) -> Tensor:
        """x (1, P, N), the patches around each (K * K, P), -1 beyond the image -> x."""
        before, after, inner = cut(self.in_proj(x), self.width, self.width)
        padded = functional.pad((before * inner)[0], (0, 0, 1, 0))  # a row of zeros, then the patches
        taps = as_float(self.weight).flatten(1).t()  # (K * K, N)
        mixed = functional.embedding(neighbors[0] + 1, padded) * taps[0]
        for tap in range(1, self.kernel**2):
            mixed = mixed + functional.embedding(neighbors[tap] + 1, padded) * taps[tap]
        made: Tensor = self.out_proj(after * mixed)
        return made


class LlamaTowerLayer(nn.Module):
    """A residual block: attention or a convolution, then an MLP."""

    def __init__(self, config: LlamaTowerConfig, index: int, norm: NormConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.width, norm) for _ in range(2))
        self.conv = PatchConv(config.width, config.kernel) if index in config.convolved else None
        self.self_attn = None if self.conv else LlamaPatchAttention(config, norm)
        mlp = MlpConfig(inner=config.inner, activation=config.activation)
        self.mlp = MLP(mlp, Site("mlp", 0, config.width, config.width), norm)

    def forward(self, x: Tensor, turns: Turns, neighbors: Tensor | None) -> Tensor:
        mix = self.conv or self.self_attn
        assert mix is not None
        x = x + mix(self.input_layernorm(x), turns, neighbors)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class SquareMerger(nn.Module):
    """x (1, P, N), squares of patches one after the other -> rows (P / merged², outputs)."""

    def __init__(self, config: LlamaTowerConfig) -> None:
        super().__init__()
        kind, bias = config.merger_norm, config.merger_bias
        self.squares, wide = config.merged**2, config.width * config.merged**2
        self.norm = Norm(config.width, NormConfig(config.merger_eps, kind, bias=kind == "layer"))
        self.merging = Linear(wide, config.width) if config.merging else None
        self.fc1 = Linear(config.width if config.merging else wide, config.merger_inner, bias=bias)
        self.act_fn, self.fc2 = nn.GELU(), Linear(config.merger_inner, config.outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x).view(1, -1, self.squares, x.shape[2])
        if self.merging is None:
            x = squares.flatten(2)
        else:
            x = self.merging(squares.transpose(2, 3).flatten(2))
        rows: Tensor = self.fc2(self.act_fn(self.fc1(x)))[0]
        return rows


class LlamaTower(nn.Module):
    """A vision transformer over the patches of one image, square by square, and what makes rows of them."""

    def __init__(self, config: LlamaTowerConfig) -> None:
        super().__init__()
        self.config, norm = config, NormConfig(config.eps)
        self.patch_embedding = Linear(3 * config.frames * config.patch**2, config.width)
        self.embedding_norm = Norm(config.width, norm)
        self.rotary_emb = RotaryEmbedding(inverse_frequencies(config.rope))
        self.layers = nn.ModuleList(LlamaTowerLayer(config, index, norm) for index in range(config.layers))
        self.merger = SquareMerger(config)

    def forward(self, pixels: Tensor, positions: Tensor, neighbors: Tensor | None = None) -> Tensor:
        """pixels (P, K), rows and columns (P, 2); with convolutions the patches around each (K * K, P) -> rows
        (P / merged², N)."""
        x = self.embedding_norm(self.patch_embedding(pixels).unsqueeze(0))
        frequencies = self.rotary_emb.inv_freq
        if self.config.takes_turns:
            frequencies = frequencies.view(-1, 2).t()
        angles = (positions.unsqueeze(-1).float() * frequencies).flatten(1).unsqueeze(0)
        turns = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, turns, neighbors)
        rows: Tensor = self.merger(x)
        return rows
