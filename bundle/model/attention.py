"""Attentions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.ranges import Count, Index, Width


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention over a cache, or without one over the tokens of the call."""

    name: str = ""  # module path
    layer: Index = -1
    heads: Count  # of queries
    kv_heads: Count  # of keys and values
    head_dim: Width
    window: Annotated[int, range(1 << 28)] = 0  # positions that a query sees, itself included; 0 for all
    rope: Index | None = 0  # index of its rotary embedding, None if positions are not encoded
    rotary_dim: Annotated[int, range(1 << 20)] = 0  # values of each head that are rotated
    cache: str = ""  # name of the cache it reads, empty without one
    causal: bool = True  # a query does not see later positions
    # Nodes ``{name}.q_rope`` and ``.k_rope`` rotate queries and keys before the attention reads them.
    turned_before: bool = False
    grows_after: Annotated[int, range(1 << 28)] = 0  # queries grow every so many positions; 0 for never
    writes: bool = True  # adds keys and values to the cache, which otherwise another layer writes
    sinks: bool = False  # each head has one more learned logit, whose part of the softmax is dropped
    latent: Annotated[int, range(1 << 20)] = 0  # width of the vector that keys and values are expanded from, or 0

    @property
    def writer(self) -> str:
        """Name of the linear whose output is added to the residual stream."""
        return f"{self.name}.o_proj"

    @property
    def inner_norms(self) -> tuple[str, ...]:
        """Names of norms that read no residual stream, and whose output no linear reads."""
        return tuple(f"{self.name}.{part}_norm" for part in "qk")

    @property
    def group_size(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def folds(self) -> bool:
        """True if a decode step may compute the query heads of a group as tokens at one position. A window or sinks
        rule this out: tokens of one head have one sink."""
        return self.group_size > 1 and not self.window and not self.sinks

    def is_sound(self, caches: Mapping[str, Cache] | None) -> bool:
        """True if the sizes fit together and fit the cache; ``caches`` is None in a model without."""
        return (
            self.heads % self.kv_heads == 0
            and (self.rope is None) == (self.rotary_dim == 0)
            and self.rotary_dim % 2 == 0
            and self.rotary_dim <= self.head_dim
            and (caches is None or self._fits(caches.get(self.cache)))
        )

    def _fits(self, cache: Cache | None) -> bool:
        return cache is not None and cache.shape == (self.kv_heads, self.head_dim)
