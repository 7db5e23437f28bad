"""Memory plans: what a bundle takes, as a list of parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from llmc.bundle.engine import Bytes

# Names of parts, in the order of a report. ``embedding`` counts a table whole, of which a page is read when a token
# asks for its row; ``mapped experts`` are resident from their first use until memory is short; ``context`` is what a
# GPU's driver and libraries take.
NAMES = (
    *("context", "engine", "tokenizer", "weights", "experts", "mapped experts", "embedding", "tower", "states"),
    *("cache", "workspace", "logits", "adapters", "per-layer table"),
)


@dataclass(frozen=True)
class Part:
    """One use of memory; all bytes are resident, and 0 where a use does not grow that way."""

    name: str  # one of NAMES; parts of one name add up
    fixed: Bytes = 0  # whatever runs
    per_row: Bytes = 0
    per_position: Bytes = 0  # of each cached position of each row
    window: Annotated[int, range(1 << 28)] = 0  # positions that a row holds at most; 0 for no limit
    per_length: Bytes = 0  # of each position of the longest row, once
    of_layers: bool = False  # each stage of a model takes its own
    beside: bool = False  # rows of a mapped file, whose pages the system takes back: not in the sum

    @property
    def takes_any(self) -> bool:
        return any((self.fixed, self.per_row, self.per_position, self.per_length))

    def bytes(self, positions: int, rows: int) -> int:
        """Bytes with room for ``positions`` cached tokens in each of ``rows`` rows."""
        held = min(positions, self.window) if self.window else positions
        return self.fixed + self.per_length * positions + rows * (self.per_row + self.per_position * held)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of loading and running a bundle, in the machine's memory or in a GPU's; pages of mapped files
    are counted."""

    uses: Annotated[tuple[Part, ...], range(65)] = ()

    @property
    def is_sound(self) -> bool:
        """True if a build could write these names."""
        return all(part.name in NAMES for part in self.uses)

    def __getitem__(self, name: str) -> Part:
        """The sum of the parts of a name, but for windows, each of which stands alone."""
        parts = [part for part in self.uses if part.name == name and not part.window]
        return Part(
            name,
            fixed=sum(part.fixed for part in parts),
            per_row=sum(part.per_row for part in parts),
            per_position=sum(part.per_position for part in parts),
            per_length=sum(part.per_length for part in parts),
        )

    def add(self, *parts: Part) -> "MemoryPlan":
        """This plan with more parts; those that take nothing are left out."""
        return MemoryPlan((*self.uses, *(part for part in parts if part.takes_any)))

    def without(self, *names: str) -> "MemoryPlan":
        return MemoryPlan(tuple(part for part in self.uses if part.name not in names))

    def add_stages(self, others: Iterable["MemoryPlan"]) -> "MemoryPlan":
        """This plan with the weights and caches of other stages in the same process."""
        return self.add(*(part for other in others for part in other.uses if part.of_layers))

    def parts(self, positions: int, rows: int = 1) -> dict[str, int]:
        """Bytes by what they are for, with room for ``positions`` cached tokens in each of ``rows`` rows."""
        uses = [part for part in self.uses if not part.beside]
        sizes = {name: [part.bytes(positions, rows) for part in uses if part.name == name] for name in NAMES}
        return {name: sum(each) for name, each in sizes.items() if each}

    def total(self, positions: int, rows: int = 1) -> int:
        return sum(part.bytes(positions, rows) for part in self.uses if not part.beside)
