"""Mixers that keep states of one size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from llmc.bundle.model.cache import Cache
from llmc.bundle.model.ranges import Index, Width

# ``conv`` is a gated short convolution alone; ``delta`` the gated delta rule (arXiv 2412.06464) and ``mamba2`` a
# selective state space (arXiv 2405.21060), both behind such a convolution.
Rule = Literal["conv", "delta", "mamba2"]

Size = Annotated[int, range(1 << 12)]


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A mixer that keeps states of one size, however many tokens came before."""

    name: str = ""  # module path
    layer: Index = -1
    rule: Rule
    # Sizes of the recurrence, 0 for ``conv``. Neighbouring value heads share a key head.
    key_heads: Size = 0
    value_heads: Size = 0
    key_dim: Size = 0
    value_dim: Size = 0
    taps: Annotated[int, range(2, 1 << 8)]  # tokens that the convolution sees, its own included
    channels: Width  # of the convolution
    caches: tuple[str, ...] = ()  # names of its states, in the order of ``state_shapes``

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of its states in one row: the convolution's, then the recurrence's."""
        conv: tuple[int, ...] = (self.taps - 1, self.channels)
        recurrence: tuple[int, ...] = (self.value_heads, self.key_dim, self.value_dim)
        return (conv,) if self.rule == "conv" else (conv, recurrence)

    @property
    def writer(self) -> str:
        """Name of the linear whose output is added to the residual stream."""
        return f"{self.name}.out_proj"

    @property
    def inner_norms(self) -> tuple[str, ...]:
        """Names of norms that read no residual stream, and whose output no linear reads."""
        return (f"{self.name}.norm",)

    @property
    def silus(self) -> int:
        """Number of SiLU activations."""
        return 0 if self.rule == "conv" else 2

    def is_sound(self, caches: Mapping[str, Cache] | None) -> bool:
        """True if its caches have the shapes of its states."""
        known = caches or {}
        return tuple(known[name].shape for name in self.caches if name in known) == self.state_shapes
