"""Attention over a cache."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.linear import Linear
from llmc.export.blocks.norm import RMSNorm
from llmc.export.blocks.rope import RotaryEmbedding
from llmc.export.config import AttentionConfig

Cache = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Grouped-query attention over a cache that the caller owns."""

    def __init__(self, config: AttentionConfig, hidden_size: int, norm_eps: float, scale: float) -> None:
        super().__init__()
        self.config, self.scale = config, scale
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = Linear(hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = Linear(hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, norm_eps) if config.qk_norm else nn.Identity()
        if config.rope is None:
            self.rotary_emb = RotaryEmbedding(np.zeros(config.head_dim // 2, np.float32))

    def forward(self, x: Tensor, past: Cache, past_lengths: Tensor, ropes: Sequence[Tensor]) -> tuple[Tensor, Cache]:
        """``ropes`` are the frequencies (D/2) of each of the decoder's ropes."""
        config = self.config
        attn, keys, values = ops.cached_attention(
            self.q_norm(self.q_proj(x)),
            self.k_norm(self.k_proj(x)),
            self.v_proj(x),
            past,
            past_lengths,
            self.rotary_emb.inv_freq if config.rope is None else ropes[config.rope],
            num_heads=config.heads,
            kv_heads=config.kv_heads,
            scale=self.scale,
            window=config.window,
        )
        return self.o_proj(attn), (keys, values)
