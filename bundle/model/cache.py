"""The memory that a layer keeps of earlier tokens."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Width

# A row of the cache can always go back so far: over drafts that were rejected, and to the border of a block of the
# prefix cache. What windows have passed is let go of once so many positions came together.
BACK, LET_GO_STEP = 64, 256

# Bytes of a state's value.
STATE_BYTES = 4

CacheKind = Literal["kv", "state"]


@dataclass(frozen=True)
class Cache:
    """Memory that a layer keeps of the tokens before.

    Attributes:
        name: its part of the tensors' names, ``past_key_values.{name}.key``.
        kind: ``kv`` holds a key and a value for each position, ``state`` holds one state whatever the length.
        shape: of one position, [kv_heads, head_dim] for ``kv``; of the state of one row for ``state``.
        window: positions that are ever read, 0 for all.
        lent: whether it is another model's, which a draft head reads and does not write.
    """

    name: str
    kind: CacheKind
    shape: Annotated[tuple[Width, ...], range(1, 5)]
    window: Annotated[int, range(1 << 28)]
    lent: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs that it comes in."""
        if self.kind == "kv":
            return f"past_key_values.{self.name}.key", f"past_key_values.{self.name}.value"
        return (f"past_state.{self.name}",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs that it goes out in, as :attr:`inputs`; none of one that is lent."""
        if self.lent:
            return ()
        if self.kind == "kv":
            return f"present.{self.name}.key", f"present.{self.name}.value"
        return (f"present_state.{self.name}",)

    def bytes(self, positions: int, bytes_per_value: int) -> int:
        """Bytes of one row with room for ``positions``; a state is float32 whatever the type of keys and values. What
        is lent is the other model's."""
        if self.lent:
            return 0
        if self.kind == "state":
            return STATE_BYTES * prod(self.shape)
        return 2 * positions * prod(self.shape) * bytes_per_value

    def shape_of(self, rows: int, positions: int) -> tuple[int, ...]:
        """Shape of each of its tensors."""
        if self.kind == "state":
            return (rows, *self.shape)
        heads, width = self.shape
        return (rows, heads, positions, width)

    def count_held(self, chunk: int) -> int:
        """Positions that a row holds at most where calls feed up to ``chunk`` tokens, 0 for all."""
        return self.window + BACK + LET_GO_STEP + chunk if self.window else 0
