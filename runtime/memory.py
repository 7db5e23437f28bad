"""Memory is planned before it is taken: weights, cache and workspace against what the machine has left."""

from pathlib import Path

from llmc.bundle import MemoryPlan
from llmc.errors import ResourceError
from llmc.runtime.machine import available_memory

MB = 1_000_000


def check_load(folder: Path, plan: MemoryPlan, positions: int) -> None:
    """Refuse to load what cannot fit with ``positions`` cached tokens.

    Raises:
        ResourceError: with the number missing and the longest context that fits.
    """
    available = available_memory()
    needed = plan.total(positions)
    if needed <= available:
        return
    spare = available - plan.total(0)
    fits = (
        f"at most {spare // (plan.cache_per_token + plan.workspace_per_token)} tokens of context fit"
        if spare > 0
        else "not even the weights fit"
    )
    parts = (plan.weights, plan.cache_per_token * positions, plan.workspace + plan.workspace_per_token * positions)
    weights, cache, workspace = (part // MB for part in parts)
    raise ResourceError(
        f"{folder} needs {needed // MB} MB ({weights} weights, {cache} cache for {positions} tokens, {workspace} "
        f"workspace), {available // MB} MB are available; {fits}: free memory, lower --max-context or build a smaller "
        "precision"
    )


def check_growth(plan: MemoryPlan, old: int, new: int) -> None:
    """Refuse to grow the cache of one row from ``old`` to ``new`` positions when memory does not suffice.

    Raises:
        ResourceError: with the numbers; the cache keeps its size.
    """
    needed, available = plan.total(new) - plan.total(old), available_memory()
    if needed > available:
        raise ResourceError(
            f"the cache for {new} tokens needs {needed // MB} MB more, {available // MB} MB are available; "
            "free memory, or use a shorter prompt or fewer new tokens"
        )
