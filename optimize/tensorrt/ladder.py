"""The ladder of builds that are tried in turn where the builder finds no kernels for integer weights.

A product of float16 with weights of 8 bits is documented for none of TensorRT's versions and refused by some ("Could
not infer output types for operation: dequantize", TensorRT issue 4832, on Orin), and which of the forms below a version
and a GPU take can only be tried.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from llmc.bundle import Recipe

INTEGERS = {"int8", "int4", "source"}
FLOATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# The blocks of 4 bits that the documents name; others are extras.
DOCUMENTED_BLOCK = 128
WIDE_SCALES = "scales in float32"  # in manifests, too


@dataclass(frozen=True)
class Step:
    """A step of the ladder.

    Attributes:
        name: of what is built instead; empty for what was asked for.
        recipe: of the weights.
        wide_scales: scales of integer weights are float32 where activations are not.
    """

    name: str
    recipe: Recipe
    wide_scales: bool = False


def ladder(recipe: Recipe, lacking: Collection[str] = ()) -> tuple[Step, ...]:
    """Steps to try in turn, the first as asked for and the last in floats; one where no weights are integers.

    ``lacking`` are precisions that a GPU to build for does not have: no step has them that was not asked for.
    """
    steps = [Step("", recipe)]
    if INTEGERS.isdisjoint(recipe.precisions()):
        return tuple(steps)
    if recipe.compute != "float32":
        steps.append(Step(WIDE_SCALES, recipe, wide_scales=True))
    small = _stored(recipe, "int4", DOCUMENTED_BLOCK)
    if small != recipe and "int4" not in lacking:
        steps.append(Step(f"int4 in blocks of {DOCUMENTED_BLOCK}", small))
    steps.append(Step(FLOATS[recipe.compute], _stored(recipe, FLOATS[recipe.compute], 0)))
    return tuple(steps)


def _stored(recipe: Recipe, precision: str, block: int) -> Recipe:
    """The recipe with another precision in the place of integers, rounded to nearest."""

    def other(name: str) -> str:
        return precision if name in INTEGERS else name

    found = replace(
        recipe,
        precision=other(recipe.precision),
        head=other(recipe.head),
        layers={pattern: other(name) for pattern, name in recipe.layers.items()},
        block_size=block,
        activations=recipe.activations if "fp8" in recipe.precisions() else "none",
    )
    same = found.precisions() == recipe.precisions() and block == recipe.block_size
    return recipe if same else replace(found, scheme="rtn")
