"""Mixers that keep states of one size."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Index, Width

Rule = Literal["conv", "delta", "mamba2"]


@dataclass(frozen=True)
class Recurrent:
    """A mixer that keeps states of one size, however many tokens came before.

    Attributes:
        name: module path.
        layer: index of its layer.
        rule: ``conv`` is a gated short convolution alone; ``delta`` the gated delta rule (arXiv 2412.06464) and
            ``mamba2`` a selective state space (arXiv 2405.21060), both behind such a convolution.
        key_heads, value_heads, key_dim, value_dim: of the recurrence, 0 without one. Neighbouring value heads share a
            key head.
        taps: tokens that the convolution sees, its own included.
        channels: that are convolved.
        caches: names of its states: the convolution's [taps - 1, channels], and the recurrence's [value_heads, key_dim,
            value_dim].
    """

    name: str
    layer: Index
    rule: Rule
    key_heads: Annotated[int, range(1 << 12)]
    value_heads: Annotated[int, range(1 << 12)]
    key_dim: Annotated[int, range(1 << 12)]
    value_dim: Annotated[int, range(1 << 12)]
    taps: Annotated[int, range(2, 1 << 8)]
    channels: Width
    caches: tuple[str, ...]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each of its states in one row, in the order of ``caches``."""
        conv: tuple[int, ...] = (self.taps - 1, self.channels)
        recurrence: tuple[int, ...] = (self.value_heads, self.key_dim, self.value_dim)
        return (conv,) if self.rule == "conv" else (conv, recurrence)
