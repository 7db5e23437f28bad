"""Borders between the stages of a model that is larger than one box, by the memory that each stage takes."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from llmc.bundle import MOST_STAGES, Geometry, Limits, MemoryPlan, Recipe
from llmc.errors import ResourceError, UsageError
from llmc.optimize.plan.memory import memory_plan
from llmc.optimize.plan.sizes import MB


class Cut(NamedTuple):
    """A stage: its layers, and the memory of a process that runs them."""

    layers: range
    memory: MemoryPlan


def choose_borders(
    geometry: Geometry, limits: Limits, recipe: Recipe, tokenizer_bytes: int, boxes: Sequence[int]
) -> list[Cut]:
    """The stages whose fullest box is as empty as it can be, with a row of the longest context in each.

    Args:
        boxes: bytes of each stage's box; zeros of boxes of one size that nobody named.

    Raises:
        UsageError: the model has not so many layers.
        ResourceError: a stage is larger than its box, however the model is cut.
    """
    most = min(geometry.layers, MOST_STAGES)
    if not 2 <= len(boxes) <= most:
        raise UsageError("stages", f"is {len(boxes)}, expected 2 to {most}: each has a layer or more")

    @cache
    def plan(first: int, end: int) -> MemoryPlan:
        plan = memory_plan(geometry.of_layers(range(first, end)), limits, recipe, tokenizer_bytes)
        plan = plan.without("embedding") if first else plan
        return plan if end == geometry.layers else plan.without("tokenizer", "logits")

    @cache
    def best(first: int, box: int) -> tuple[float, tuple[int, ...]]:
        """The share of the fullest box from ``box`` on, which begins with the layer ``first``; and the ends."""
        if not (left := len(boxes) - box - 1):
            return plan(first, geometry.layers).total(limits.max_context) / (boxes[box] or 1), (geometry.layers,)
        cuts = []
        for end in range(first + 1, geometry.layers - left + 1):
            share, (rest, later) = plan(first, end).total(limits.max_context) / (boxes[box] or 1), best(end, box + 1)
            cuts.append((max(share, rest), (end, *later)))
        return min(cuts)

    fullest, ends = best(0, 0)
    cuts = [Cut(range(*pair), plan(*pair)) for pair in zip((0, *ends[:-1]), ends, strict=True)]
    if boxes[0] and fullest > 1:
        sizes = ", ".join(f"{cut.memory.total(limits.max_context) // MB} MB" for cut in cuts)
        raise ResourceError(
            f"cut as well as can be, the stages take {sizes} with a context of {limits.max_context}, and one is larger "
            "than its box; name more or larger boxes, or a smaller --max-context or precision"
        )
    return cuts
