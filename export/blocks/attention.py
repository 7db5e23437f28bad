"""Attention over a cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.linear import Linear, as_float, cut
from llmc.export.blocks.norm import Norm
from llmc.export.blocks.rope import RotaryEmbedding
from llmc.export.config import AttentionConfig, NormConfig, Rope

Cache = tuple[Tensor, Tensor]


class Rotation(nn.Module):
    """A rope applied before norms; a module only so that its node in the graph has a name."""

    def forward(self, x: Tensor, lengths: Tensor, inv_freq: Tensor, knobs: ops.Knobs, head_dim: int) -> Tensor:
        return ops.rotated_heads(x, lengths, inv_freq, knobs, head_dim)


class Attention(nn.Module):
    """Grouped-query attention over a cache that the caller owns, or without one over the tokens of the call."""

    def __init__(
        self, config: AttentionConfig, rope: Rope | None, hidden_size: int, norm: NormConfig, inputs: int = 0
    ) -> None:
        super().__init__()
        self.config, inputs = config, inputs or hidden_size
        self.knobs = ops.Knobs(
            num_heads=config.heads,
            kv_heads=config.kv_heads,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            softcap=config.softcap,
            interleaved=rope is not None and rope.interleaved,
            magnitude=rope.magnitude if rope else 1.0,
            growth=config.query_growth,
            period=float(config.growth_period),
        )
        queries, keys = config.widths
        self.q_proj = Linear(inputs, (2 if config.gated else 1) * queries, bias=config.qkv_bias)
        self.k_proj, self.v_proj = (
            Linear(inputs, keys, bias=config.qkv_bias) if part in config.parts else nn.Identity() for part in "kv"
        )
        self.o_proj = Linear(queries, hidden_size, bias=config.o_bias)
        sizes = {"none": (0, 0), "whole": config.widths}.get(config.qk_norm, (config.head_dim,) * 2)
        self.q_norm, self.k_norm = (Norm(size, norm) if size else nn.Identity() for size in sizes)
        if config.source is not None:
            self.k_norm = nn.Identity()
        self.q_scale = self.k_scale = None
        if config.qk_scales:
            self.q_scale, self.k_scale = (
                nn.Parameter(torch.empty(width), requires_grad=False) for width in config.widths
            )
        self.v_norm = Norm(config.head_dim, norm) if config.value_norm and config.source is None else nn.Identity()
        self.q_rope, self.k_rope = Rotation(), Rotation()
        self.sinks = nn.Parameter(torch.empty(config.heads), requires_grad=False) if config.sinks else None
        if config.rope is None or config.turned_before:
            self.rotary_emb = RotaryEmbedding(np.zeros(config.head_dim // 2, np.float32))

    def forward(
        self, x: Tensor, past: Cache | None, lengths: Tensor, ropes: Sequence[Tensor], shown: ops.Shown = ops.PLAIN
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``lengths`` (B) are those of the cache, or without one of the rows; ``ropes`` are the frequencies (R/2) of
        each of the decoder's ropes. An attention that reads the cache of another layer gets it whole, and positions
        (B, S) in the place of lengths. ``shown`` is what images change."""
        config, gate = self.config, None
        if config.source is not None:
            assert past is not None and config.rope is not None
            queries = self.q_norm(self.q_proj(x))
            attn = ops.shared_attention(queries, past, lengths, ropes[config.rope], self.knobs, behind=config.lent)
            return self.o_proj(attn), ()
        q, k, inv_freq = self.q_proj(x), self.k_proj(x), None if config.rope is None else ropes[config.rope]
        v = k if config.keys_are_values else self.v_proj(x)
        if config.gated:
            q, gate = (part.flatten(-2) for part in cut(q.unflatten(-1, (-1, 2 * config.head_dim)), config.head_dim))
        if config.turned_before and inv_freq is not None:
            q, k = (
                rope(part, lengths, inv_freq, self.knobs, config.head_dim)
                for rope, part in ((self.q_rope, q), (self.k_rope, k))
            )
            inv_freq = None
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        if self.q_scale is not None and self.k_scale is not None:
            q, k = q * as_float(self.q_scale), k * as_float(self.k_scale)
        inv_freq = self.rotary_emb.inv_freq if inv_freq is None else inv_freq
        if past is None:
            assert self.sinks is None, "no encoder has sinks"
            attn = ops.self_attention(q, k, v, lengths, inv_freq, self.knobs, causal=config.causal)
            return self.o_proj(attn), ()
        sinks = None if self.sinks is None else as_float(self.sinks)
        attn, keys, values = ops.cached_attention(q, k, v, past, lengths, inv_freq, self.knobs, sinks, shown)
        return self.o_proj(attn if gate is None else attn * torch.sigmoid(gate)), (keys, values)
