"""The memory that a layer keeps of earlier tokens."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from llmc.bundle.model.ranges import Width

# Positions that a row can always go back: over rejected drafts, and to the border of a block of the prefix cache.
BACK = 64
# Positions behind a window are freed once there are so many.
LET_GO_STEP = 256

# Bytes of a state's value.
STATE_BYTES = 4

# ``kv`` holds a key and a value for each position; ``state`` holds one state whatever the length.
CacheKind = Literal["kv", "state"]


@dataclass(frozen=True)
class Cache:
    """Memory that a layer keeps of earlier tokens."""

    name: str  # part of the tensors' names, ``past_key_values.{name}.key``
    kind: CacheKind
    shape: Annotated[tuple[Width, ...], range(1, 5)]  # of a position (kv_heads, head_dim), or of a row's state
    window: Annotated[int, range(1 << 28)]  # positions that are ever read, 0 for all
    lent: bool = False  # another model's cache, which a draft head reads and does not write

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs for this cache."""
        if self.kind == "kv":
            return f"past_key_values.{self.name}.key", f"past_key_values.{self.name}.value"
        return (f"past_state.{self.name}",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs for this cache, in the order of :attr:`inputs`; a lent cache has none."""
        if self.lent:
            return ()
        if self.kind == "kv":
            return f"present.{self.name}.key", f"present.{self.name}.value"
        return (f"present_state.{self.name}",)

    def bytes(self, positions: int, bytes_per_value: int) -> int:
        """Bytes of one row with room for ``positions``. States are float32 whatever the type of keys and values; a lent
        cache counts as the other model's."""
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
        """Positions that a row holds at most if calls feed up to ``chunk`` tokens, 0 for all."""
        return self.window + BACK + LET_GO_STEP + chunk if self.window else 0
