"""Attentions."""

from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.model.ranges import Count, Index, Width


@dataclass(frozen=True)
class Attention:
    """An attention over a cache of its own, or of an encoder over the tokens of the call.

    Attributes:
        name: module path.
        layer: index of its layer.
        heads, kv_heads, head_dim: of queries, of keys and values, and the width of each.
        window: positions that a query sees, itself included; 0 for all.
        rope: index of its rotary embedding, None where positions are not encoded.
        rotary_dim: values of each head that are rotated, 0 without a rope.
        cache: name of its cache, empty in an encoder.
        writes: whether it adds keys and values to it, instead of reading those of the layer that does.
        latent: width of the vector that keys and values are expanded from, 0 where they come from the stream.
        causal: whether a position sees none after it.
        turned_before: whether queries and keys are rotated by nodes of their own, ``{name}.q_rope`` and ``.k_rope``, in
            front of what the attention reads.
        grows_after: positions after which queries become longer, and have rotary tables of their own; 0 for none.
        sinks: whether each head has a learned logit more, whose share of the softmax falls away.
    """

    name: str
    layer: Index
    heads: Count
    kv_heads: Count
    head_dim: Width
    window: Annotated[int, range(1 << 28)]
    rope: Index | None
    rotary_dim: Annotated[int, range(1 << 20)]
    cache: str
    causal: bool = True
    turned_before: bool = False
    grows_after: Annotated[int, range(1 << 28)] = 0
    writes: bool = True
    sinks: bool = False
    latent: Annotated[int, range(1 << 20)] = 0

    @property
    def group_size(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def folds(self) -> bool:
        """True for heads in groups without a window or sinks: a step may give them as tokens of one position, and
        tokens that share a head have but one sink."""
        return self.group_size > 1 and not self.window and not self.sinks
