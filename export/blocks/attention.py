"""Attention over a cache."""

import numpy as np
import torch
from torch import Tensor, nn

from llmc.export import ops
from llmc.export.blocks.linear import as_float, cut
from llmc.export.blocks.part import Call, PartModule, Tensors
from llmc.export.blocks.rope import RotaryEmbedding
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site


class Rotation(nn.Module):
    """A rope applied before norms; a module only so that its node in the graph has a name."""

    def forward(self, x: Tensor, lengths: Tensor, inv_freq: Tensor, knobs: ops.Knobs, head_dim: int) -> Tensor:
        return ops.rotated_heads(x, lengths, inv_freq, knobs, head_dim)


class Attention(PartModule):
    """Grouped-query attention over a cache that the caller owns, or without one over the tokens of the call."""

    def __init__(self, config: AttentionConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, norm)
        self.config, rope = config, None if config.rope is None else site.ropes[config.rope]
        self.knobs = ops.Knobs(
            num_heads=config.heads,
            kv_heads=config.kv_heads,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            softcap=config.softcap,
            interleaved=rope is not None and rope.interleaved,
            magnitude=rope.magnitude if rope else 1.0,
            growth=config.query_growth,
            period=float(config.grows_after or 1),
        )
        self.q_rope, self.k_rope = Rotation(), Rotation()
        if config.rope is None or config.rotates_first:
            self.rotary_emb = RotaryEmbedding(np.zeros(config.head_dim // 2, np.float32))

    def forward(self, x: Tensor, past: Tensors | None, call: Call) -> tuple[Tensor, Tensors]:
        """x (B, S, N), keys and values of its cache or of the one that it reads -> values (B, S, N), its cache."""
        config, gate, lengths = self.config, None, call.lengths
        inv_freq = None if config.rope is None else call.ropes[config.rope]
        cache = None if past is None else (past[0], past[1])
        if config.source is not None:
            assert cache is not None and inv_freq is not None
            queries = self.normalize("q_norm", self.q_proj(x))
            return self.o_proj(
                ops.shared_attention(queries, cache, lengths, inv_freq, self.knobs, behind=config.behind)
            ), ()
        q, k = self.q_proj(x), self.k_proj(x)
        v = k if config.keys_are_values else self.v_proj(x)
        if config.gate == "beside_queries":
            q, gate = (part.flatten(-2) for part in cut(q.unflatten(-1, (-1, 2 * config.head_dim)), config.head_dim))
        if config.rotates_first and inv_freq is not None:
            q, k = (
                rope(part, lengths, inv_freq, self.knobs, config.head_dim)
                for rope, part in ((self.q_rope, q), (self.k_rope, k))
            )
            inv_freq = None
        q, k, v = (self.normalize(f"{name}_norm", part) for name, part in zip("qkv", (q, k, v), strict=True))
        if config.qk_scales:
            q, k = q * as_float(self.q_scale), k * as_float(self.k_scale)
        inv_freq = self.rotary_emb.inv_freq if inv_freq is None else inv_freq
        if cache is None:
            assert not config.sinks, "sinks are for attention over a cache"
            attn = ops.self_attention(q, k, v, lengths, inv_freq, self.knobs, causal=config.causal, bias=call.bias)
            return self.o_proj(attn), ()
        sinks = as_float(self.sinks) if config.sinks else None
        shown = call.shown._replace(looks=config.sees_rows_ahead)
        attn, keys, values = ops.cached_attention(q, k, v, cache, lengths, inv_freq, self.knobs, sinks, shown)
        gate = self.g_proj(x) if config.gate in ("value", "head") else gate
        return self.o_proj(attn if gate is None else self._gate(attn, torch.sigmoid(gate))), (keys, values)

    def _gate(self, attn: Tensor, gate: Tensor) -> Tensor:
        """attn (B, S, H * D), a factor of each value or of each head (B, S, H) -> attn."""
        if self.config.gate != "head":
            return attn * gate
        heads = attn.view(*attn.shape[:-1], self.config.heads, self.config.head_dim)
        return (heads * gate.unsqueeze(-1)).flatten(-2)
