"""How the KV cache grows: in steps as sequences get longer, never the whole context up front."""

from llmc.bundle import MemoryPlan
from llmc.errors import ResourceError

FIRST_STEP = 256
LARGE_STEP = 1024
MB = 1_000_000


def next_capacity(needed: int, maximum: int) -> int:
    """Positions to reserve for ``needed`` ones: multiples of 256, above 1,024 of 1,024, at most ``maximum``.

    Every growth copies the cache once; with these steps that stays far below the cost of the tokens in between.
    """
    step = FIRST_STEP if needed <= LARGE_STEP else LARGE_STEP
    return min(maximum, -(-needed // step) * step)


class CacheBudget:
    """Whether the cache may have so many rows and positions, in the bytes that the process may take.

    Args:
        plan: the bundle's memory plan.
        memory: bytes for the whole process.
        others: bytes of them that something else was promised: the prefix cache.
    """

    def __init__(self, plan: MemoryPlan, memory: int, others: int = 0) -> None:
        self._plan = plan
        self._memory = memory
        self._others = others

    def fits(self, positions: int, rows: int) -> bool:
        """Whether ``rows`` rows of ``positions`` positions fit."""
        return self._plan.total(positions, rows) + self._others <= self._memory

    def refusal(self, positions: int, rows: int) -> ResourceError:
        """What to say to a request that does not fit even alone."""
        needed = self._plan.total(positions, rows) + self._others
        return ResourceError(
            f"the request may grow to {positions} positions in {rows} row(s), for which {needed // MB} MB are needed "
            f"in all, and {self._memory // MB} MB may be taken; shorten its prompt, ask for fewer tokens or free memory"
        )
