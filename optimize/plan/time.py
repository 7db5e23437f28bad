"""Rough time of a build, from the geometry and the recipe alone.

With ``--int8`` Qwen2.5-0.5B's geometry took 288 core-seconds on two cores with AVX-512, and this says 284; with
``--int4`` 403 and 425. SmolLM2-135M took 82 and 121, and this says 98 and 140.

Most of it is calibration: each layer multiplies every token, again with the weights that it chose, if it chose any, and
second moments take the square of what its linears read.
"""

from llmc.bundle import Geometry, Recipe
from llmc.optimize.recipe import needs_calibration
from llmc.runtime.host.machine import cpu_flags

# Floating point operations of torch per second on one core of a server with AVX-512; half of that on one without.
FLOPS_PER_CORE = 70e9
# Core-seconds that any model takes: to import torch, run the golden prompts, and compare calls of many sizes.
ANY_MODEL = 35.0
# Core-seconds for a weight: read, rounded for each graph, written and judged; and to search and round it by GPTQ.
ROUNDING, GPTQ = 70e-9, 160e-9


def estimate_build(geometry: Geometry, recipe: Recipe, tokens: int, cores: int) -> float:
    """Seconds that a build takes that calibrates on so many tokens, on cores that do nothing else."""
    layers = [group for group in geometry.readers if group[0].layer is not None]
    linears, experts = (sum(linear.size for group in layers for linear in group), geometry.mixtures)
    weights = linears + sum(item.size for item in experts)
    seconds = ANY_MODEL + ROUNDING * (weights + geometry.tables[0].size)
    chosen = "int4" in recipe.precisions()
    speed = FLOPS_PER_CORE if "avx512f" in cpu_flags() else FLOPS_PER_CORE / 2
    if needs_calibration(recipe):
        used = linears + sum(item.size * item.chosen / item.count for item in experts)
        passes = 2 if recipe.smoothing or chosen else 1
        seconds += passes * tokens * 2 * used / speed
    if recipe.scheme == "gptq":
        read = sum(group[0].inputs ** 2 for group in layers)
        read += sum(item.chosen * part.inputs**2 for item in experts for part in item.parts)
        factors = sum(item.count * part.inputs**3 / 3 for item in experts for part in item.parts)
        times = chosen + recipe.rotates("prefill")  # decode's integers, and prompts'
        seconds += (tokens * read + factors) / speed + GPTQ * weights * times
    return seconds / cores
