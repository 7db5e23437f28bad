"""Borders between the stages of a model that is larger than one box, by the memory that each stage takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from llmc.bundle import MOST_STAGES, Geometry, Limits, MemoryPlan, Recipe
from llmc.errors import ResourceError, UsageError
from llmc.optimize.plan.memory import MB, memory_plan


@dataclass(frozen=True)
class Cut:
    """A stage: its layers, and what it takes of its box's memory."""

    layers: range
    memory: MemoryPlan


def stage_memory(
    geometry: Geometry, limits: Limits, recipe: Recipe, tokenizer_bytes: int, layers: range
) -> MemoryPlan:
    """Memory of a process that runs some layers; the last ones come with the tokenizer and the head."""
    plan = memory_plan(geometry.of_layers(layers), limits, recipe, tokenizer_bytes)
    if layers.start:
        plan = replace(plan, embedding=0)
    if layers.stop < geometry.layers:
        plan = replace(plan, tokenizer=0, logits=0)
    return plan


def check_splittable(geometry: Geometry, limits: Limits, target: str) -> None:
    """Refuse what is not run in stages. Raises UsageError: with the part's name."""
    parts = {
        f"a model for {target}": target != "cpu",
        "a model that embeds or ranks": geometry.encoder,
        "a model that sees": geometry.vision,
        "a model with layers that read the caches of others": geometry.shares,
        "a model with inputs of each layer's own": geometry.per_layer,
        "a model with adapters beside it": limits.adapters,
    }
    if found := [name for name, there in parts.items() if there]:
        raise UsageError(f"{found[0]} cannot be cut into stages; leave stages out")


def choose_borders(
    geometry: Geometry, limits: Limits, recipe: Recipe, tokenizer_bytes: int, boxes: Sequence[int]
) -> tuple[Cut, ...]:
    """The stages whose fullest box is as empty as it can be, with a row of the longest context in each.

    Args:
        boxes: bytes of each stage's box; zeros of boxes of one size that nobody named.

    Raises:
        UsageError: there are fewer than two boxes, or more than layers.
        ResourceError: a stage is larger than its box, however the model is cut.
    """
    if not 2 <= len(boxes) <= min(geometry.layers, MOST_STAGES):
        most = min(geometry.layers, MOST_STAGES)
        raise UsageError(f"stages are {len(boxes)}, expected 2 to {most}: each has a layer or more")

    @cache
    def memory(first: int, end: int) -> MemoryPlan:
        return stage_memory(geometry, limits, recipe, tokenizer_bytes, range(first, end))

    @cache
    def best(first: int, box: int) -> tuple[float, tuple[int, ...]]:
        """The fullest box's share from ``box`` on, which begins with the layer ``first``; and where they end."""
        left = len(boxes) - box - 1
        ends = range(first + 1, geometry.layers - left + 1) if left else [geometry.layers]
        found = []
        for end in ends:
            share = memory(first, end).total(limits.max_context) / (boxes[box] or 1)
            if found and share >= min(found)[0]:  # it only grows
                break
            rest, later = best(end, box + 1) if left else (0.0, ())
            found.append((max(share, rest), (end, *later)))
        return min(found)

    fullest, ends = best(0, 0)
    cuts = tuple(Cut(range(*pair), memory(*pair)) for pair in zip((0, *ends[:-1]), ends, strict=True))
    if boxes[0] and fullest > 1:
        sizes = [f"{cut.memory.total(limits.max_context) // MB} MB" for cut in cuts]
        raise ResourceError(
            f"cut as well as can be, the stages take {', '.join(sizes)} with a context of {limits.max_context}, the "
            f"boxes have {', '.join(f'{box // MB} MB' for box in boxes)}; take more or larger boxes, or a smaller "
            "--max-context or precision"
        )
    return cuts
