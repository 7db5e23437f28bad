"""Attentions."""

from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.cache import Cache
from llmc.bundle.model.linear import Linear
from llmc.export.parts.site import Part, Shapes, Site, place

QkNorm = Literal["none", "head", "whole", "head_after_rope", "unweighted_head"]
# A gate's sigmoid multiplies the output: a gate for each value, made by ``q_proj`` (each head's query, then its gate)
# or by a linear of its own, or one for each head.
Gate = Literal["none", "beside_queries", "value", "head"]


# Ranges of distances that share a bias, for each direction: single ones up to the half, then ever longer ones.
RANGES, FURTHEST = 16, 128


def find_range(distance: int) -> int:
    """The row of a stored table of biases for how far a key comes before its query (arXiv 1910.10683)."""
    ahead, apart, single = RANGES if distance < 0 else 0, abs(distance), RANGES // 2
    if apart < single:
        return ahead + apart
    # In float32, as transformers does: at its borders a range is chosen by rounding.
    steps = np.log(np.float32(apart) / np.float32(single)) / np.float32(log(FURTHEST / single))
    return ahead + min(RANGES - 1, single + int(steps * np.float32(RANGES - single)))


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Attention, Part):
    """An attention and its arithmetic."""

    scale: float | None = None  # of the products of queries and keys; None is head_dim ** -0.5
    softcap: float = 0.0  # c in c * tanh(products / c), 0 for none
    query_growth: float = 0.0  # g in 1 + g * ln(1 + floor(position / grows_after)), a factor of queries; 0 for none
    # Queries and keys are normalised before rotation, each head (with or without a weight) or all heads together, or
    # each head after it.
    qk_norm: QkNorm = "none"
    qk_scales: bool = False  # each head has weights of its own after its norm, whose weights are ones
    qkv_bias: bool = False
    o_bias: bool = False
    gate: Gate = "none"
    value_norm: bool = False  # the heads of values are normalised too, without a weight
    keys_are_values: bool = False  # values are what ``k_proj`` makes, before its norm and rotation
    source: int | None = None  # layer with the same heads whose keys and values are read; None: its own
    behind: bool = False  # that layer is another model's and has not seen the token: only earlier positions are seen
    sees_rows_ahead: bool = True  # a row of an image sees later rows of it, in models where rows do
    value_dim: int = 0  # width of a head's values if keys and values are expanded from a latent vector
    query_latent: int = 0  # width of the vector that queries are expanded from, 0 if they come from the stream

    @property
    def rotates_first(self) -> bool:
        """True if queries and keys are rotated before their norms, thus outside the attention operator."""
        return self.rope is not None and self.qk_norm == "head_after_rope"

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all query heads together, and of all key heads."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def parts(self) -> str:
        """Its projections among ``q``, ``k`` and ``v``."""
        return "q" if self.source is not None or self.latent else "qk" if self.keys_are_values else "qkv"

    def list_linears(self, site: Site) -> list[Linear]:
        queries, keys = self.widths
        if self.query_latent:
            linears = [
                site.read("q_a_proj", self.query_latent),
                site.expand("q_proj", queries, self.query_latent, "q_a_norm"),
            ]
        else:
            rows = ((2 if self.gate == "beside_queries" else 1) * queries, keys, keys)
            linears = [site.read(f"{part}_proj", n, self.qkv_bias) for part, n in zip(self.parts, rows, strict=False)]
        if self.latent:
            rotated, queries = site.ropes[self.rope or 0].dim, self.heads * self.value_dim
            expanded = queries + self.heads * (self.head_dim - rotated)
            linears.append(site.read("kv_a_proj", self.latent + rotated))
            linears.append(site.expand("kv_b_proj", expanded, self.latent, "kv_a_norm"))
        if self.gate == "value":
            linears.append(site.read("g_proj", queries))
        elif self.gate == "head":
            linears.append(site.read("g_proj", self.heads, exact=True))
        producer = f"{site.path}.v_proj" if self.parts == "qkv" and not self.value_norm else ""
        return [*linears, site.write("o_proj", queries, self.o_bias, producer)]

    def list_norms(self, hidden: int) -> list[tuple[str, int]]:
        widths = {"none": (), "whole": self.widths}.get(self.qk_norm, (self.head_dim,) * 2)
        norms = [(f"{part}_norm", width) for part, width in zip("qk", widths, strict=False)]
        if self.source is not None:
            return norms[:1]
        norms += [("v_norm", self.head_dim)] if self.value_norm else []
        latents = ("q_a_norm", self.query_latent), ("kv_a_norm", self.latent)
        return norms + [(name, width) for name, width in latents if width]

    def list_shapes(self, hidden: int) -> Shapes:
        scales = zip("qk", self.widths, strict=True) if self.qk_scales else ()
        sinks: Shapes = {"sinks": (self.heads,)} if self.sinks else {}
        return sinks | {f"{part}_scale": (width,) for part, width in scales}

    def list_caches(self, site: Site) -> list[Cache]:
        kept = self.source is None and site.cached
        return [Cache(str(site.layer), "kv", (self.kv_heads, self.head_dim), self.window)] if kept else []

    def entry(self, site: Site) -> Attention:
        """The inventory's entry."""
        writer = site.layer if self.source is None else self.source
        return place(
            Attention,
            self,
            name=site.path,
            layer=site.layer,
            rotary_dim=0 if self.rope is None else site.ropes[self.rope].dim + site.ropes[self.rope].still,
            cache=str(writer) if site.cached else "",
            turned_before=self.rotates_first,
            writes=self.source is None,
        )
