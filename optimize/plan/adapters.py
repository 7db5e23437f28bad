"""Memory of adapters that are loaded beside a model."""

from collections.abc import Iterator

from llmc.bundle import Geometry, Limits, Part, Recipe
from llmc.optimize.lower.onnxruntime.adapters import without_rotation
from llmc.optimize.plan.sizes import BLOCK_COPIES, OPENED_GRAPH, weight_bytes


def plan_factors(geometry: Geometry, limits: Limits, recipe: Recipe) -> Iterator[Part]:
    """The graph for adapters, the factors of as many as may be loaded, and a copy of them for each row."""
    if limits.adapters:
        opened = [linear for linear in geometry.linears if linear.is_open]
        factors = 4 * limits.rank * sum(linear.inputs + linear.outputs for linear in opened)
        *_, weights = weight_bytes(geometry, without_rotation(recipe), BLOCK_COPIES).values()  # packed once more
        yield Part("adapters", OPENED_GRAPH + weights + limits.adapters * factors, per_row=factors)


def count_opened_bytes(geometry: Geometry, limits: Limits, recipe: Recipe) -> int:
    """Bytes that the graph for adapters adds to a bundle on disk."""
    return sum(weight_bytes(geometry, without_rotation(recipe)).values()) if limits.adapters else 0
