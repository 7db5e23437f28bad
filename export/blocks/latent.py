"""Attention whose keys and values are expanded from one vector of each token (MLA, arXiv 2405.04434)."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from llmc.export import ops
from llmc.export.blocks.attention import Attention
from llmc.export.blocks.linear import cut
from llmc.export.blocks.part import Call, Tensors
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.site import Site

# Epsilon of the norms of latent vectors; other norms may have another one. Source: transformers, deepseek_v2.
EPS = 1e-6


class LatentAttention(Attention):
    """The expanded form: the cache holds keys and values of each head. Values are as wide as keys there, filled with
    zeros, for kernels know one width; the part of a head that is rotated, which all keys share, comes first."""

    def __init__(self, config: AttentionConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, replace(norm, eps=EPS))
        assert config.rope is not None
        self.plain = config.head_dim - site.ropes[config.rope].dim

    def forward(self, x: Tensor, past: Tensors | None, call: Call) -> tuple[Tensor, Tensors]:
        """As :meth:`llmc.export.blocks.attention.Attention.forward`, always with a cache, and without images."""
        config = self.config
        assert past is not None and config.rope is not None and call.shown == ops.PLAIN
        read = self.normalize("q_a_norm", self.q_a_proj(x)) if config.query_latent else x
        queries = cut(self._split(self.q_proj(read)), self.plain)
        latent, turned = cut(self.kv_a_proj(x), config.latent)
        plain, values = cut(self._split(self.kv_b_proj(self.normalize("kv_a_norm", latent))), self.plain)
        keys = torch.cat((self._split(torch.cat([turned] * config.heads, -1)), plain), -1)
        wide = functional.pad(values, (0, config.head_dim - config.value_dim))
        q, k, v = (part.flatten(-2) for part in (torch.cat(queries[::-1], -1), keys, wide))
        attn, *present = ops.cached_attention(
            q, k, v, (past[0], past[1]), call.lengths, call.ropes[config.rope], self.knobs
        )
        return self.o_proj(self._split(attn)[..., : config.value_dim].flatten(-2)), tuple(present)

    def _split(self, x: Tensor) -> Tensor:
        """(B, S, H*D) -> (B, S, H, D)"""
        return x.view(*x.shape[:-1], self.config.heads, -1)
