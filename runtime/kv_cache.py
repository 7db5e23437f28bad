"""How the KV cache grows: in steps as sequences get longer, never the whole context up front."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llmc.bundle import EnginePlan, Manifest
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


def rounded_up(engine: EnginePlan | None, positions: int) -> int:
    """Positions that a session makes room for when it is asked for so many: a TensorRT engine has one capacity, or one
    for each of its buckets; other engines take any."""
    if engine is None:
        return positions
    return engine.capacity or next((bucket for bucket in engine.buckets if bucket >= positions), positions)


def device_bytes(manifest: Manifest, positions: int, rows: int) -> int:
    """Bytes of the GPU's memory with room for ``positions`` in each of ``rows`` rows; 0 for a bundle without a GPU."""
    if manifest.device is None:
        return 0
    return manifest.device.total(rounded_up(manifest.engine, positions), rows)


@dataclass(frozen=True)
class _Share:
    """What of one memory may be taken, and what so many positions in so many rows take; ``what`` names it."""

    needed: Callable[[int, int], int]
    limit: int
    what: str


class CacheBudget:
    """Whether the cache may have so many rows and positions, in the bytes that may be taken.

    Args:
        manifest: of the bundle; its plans say what rows take of the process's memory and of the GPU's.
        memory: bytes for the whole process.
        others: bytes of them that something else was promised: the prefix cache.
        device_memory: bytes of the GPU's memory that the session may take in all; None where it has none.
    """

    def __init__(self, manifest: Manifest, memory: int, others: int = 0, device_memory: int | None = None) -> None:
        plan = manifest.memory
        self._shares = [_Share(lambda positions, rows: plan.total(positions, rows) + others, memory, "MB")]
        if device_memory is not None:
            self._shares.append(_Share(partial(device_bytes, manifest), device_memory, "MB of the GPU's memory"))

    def fits(self, positions: int, rows: int) -> bool:
        """Whether ``rows`` rows of ``positions`` positions fit."""
        return self._lacking(positions, rows) is None

    def refusal(self, positions: int, rows: int) -> ResourceError:
        """What to say to a request that does not fit even alone."""
        share = self._lacking(positions, rows) or self._shares[0]
        return ResourceError(
            f"the request may grow to {positions} positions in {rows} row(s), for which "
            f"{share.needed(positions, rows) // MB} {share.what} are needed in all, and {share.limit // MB} MB may be "
            "taken; shorten its prompt, ask for fewer tokens or free memory"
        )

    def _lacking(self, positions: int, rows: int) -> _Share | None:
        return next((share for share in self._shares if share.needed(positions, rows) > share.limit), None)
