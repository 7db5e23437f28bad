"""Bytes of weights, tables and activations, from geometry and recipe alone.

The constants were measured as those of :mod:`llmc.optimize.plan.memory`.
"""

from dataclasses import replace

from llmc.bundle import Geometry, Recipe
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.linear import Linear
from llmc.optimize.lower.context import (
    Computed,
    Float16,
    Mxfp4,
    OwnCodes,
    PerToken,
    QuantConfig,
    Static,
    WeightOnly,
    quant_configs,
)
from llmc.optimize.lower.onnxruntime.experts import fit_block
from llmc.optimize.quantize.grid import OFFSETS

MB = 1_000_000
# Python, numpy, tokenizers, jinja2 and onnxruntime after their import and the first run: half of it pages of libraries.
INTERPRETER = 72 * MB
# Nodes, kernels, threads and buffers of an opened graph.
OPENED_GRAPH = 11 * MB
# MatMulNBits packs, beside the scales that stay mapped, a copy of them and the sum of each block, in float32 as well.
BLOCK_COPIES = 3
# QMoE packs its weights and keeps what it packed them from: 137 MB of 90. MoE multiplies floats as they are mapped.
EXPERT_COPIES = 1.5
# The matrix that rotates the residual stream is packed for each of its two products.
ROTATIONS = 2
# Widest point of a layer: gate, up and their product, and residual, norm and attention's input and output. Twice, for
# the engine's arena keeps what calls of another length have left.
WIDE_ARRAYS, NARROW_ARRAYS = 2 * 3, 2 * 4
# A layer of the reference as the engine runs it: float32 weights folded from the stored type, and packed for kernels.
REFERENCE_COPIES = 2
# Between an expert's codes and its floats lie numbers, values and their products.
EXPERT_STEPS = 4


def linear_bytes(linear: Linear, config: QuantConfig, *, copies: int = 1, compute: int = 0) -> int:
    """Bytes of a linear's weights as they are stored or held.

    Args:
        copies: of the scales of blocks, :data:`BLOCK_COPIES` in the engine for CPUs.
        compute: bytes of an activation's value and of a scale on a GPU; 0 for CPUs, whose engine pads blocks, and makes
            float32 of float16.
    """
    scale = compute or 4
    match config:
        case WeightOnly(grid):
            blocks = grid.groups(linear.inputs)
            inputs = linear.inputs if compute else blocks * grid.width(linear.inputs)
            zeros = 0 if grid.symmetric else -(-blocks * grid.bits // 8)
            sums = replace(linear, inputs=blocks)
            offsets = linear_bytes(sums, WeightOnly(OFFSETS), copies=copies, compute=compute) if grid.shifted else 0
            return linear.outputs * (inputs * grid.bits // 8 + scale * blocks * copies + zeros) + offsets
        case PerToken() | Static():  # a byte each, and a scale for each output
            return linear.size + scale * linear.outputs
        case Computed():
            return scale * linear.size
        case Float16():
            return (2 if compute else 4) * linear.size
        case _:
            return 4 * linear.size


def expert_bytes(item: Experts, config: QuantConfig) -> int:
    """Bytes of a mixture's experts as the engine holds them; 0 if it reads them in the mapped file."""
    if isinstance(config, Mxfp4):
        return 0
    if isinstance(config, WeightOnly):
        config = WeightOnly(fit_block(config.grid, item))
    apart = item.activation != "silu"  # a product for each expert
    stored = item.count * sum(linear_bytes(it, config, copies=BLOCK_COPIES if apart else 1) for it in item.parts)
    return round(stored * (EXPERT_COPIES if isinstance(config, WeightOnly) and not apart else 1))


def coded_bytes(item: Experts) -> int:
    """Two codes in a byte, and a byte for each block."""
    return item.size // 2 + (item.size // item.codes.block if item.codes else 0)


def weight_bytes(geometry: Geometry, recipe: Recipe, copies: int = 1) -> dict[str, int]:
    """Bytes of each graph's linears and of a rotation by phase, norms and biases left out: they are a thousandth."""
    rotation = 4 * geometry.hidden_size**2 * min(copies, ROTATIONS)
    return {
        phase: sum(linear_bytes(linear, stored.of(linear.name), copies=copies) for linear in geometry.linears)
        + sum(expert_bytes(item, stored.stored(item.name)) for item in geometry.mixtures)
        + (rotation if recipe.rotates(phase) else 0)
        for phase, stored in quant_configs(recipe, geometry).items()
    }


def table_bytes(table: Linear, config: QuantConfig, compute: int = 0) -> int:
    """Bytes of a table, on disk as in memory: rows are read where they are mapped. ``compute`` as of a linear."""
    if isinstance(config, OwnCodes):
        codes = table.codes
        assert codes is not None
        scales = (2 if codes.half else 4) * table.size // codes.block
        return codes.bits * table.size // 8 + scales + offset_bytes(table, config)
    if isinstance(config, WeightOnly):
        plain = WeightOnly(replace(config.grid, shifted=False))
        return linear_bytes(table, plain, compute=compute) + offset_bytes(table, config)
    return linear_bytes(table, config, compute=compute) if compute else file_bytes(table, config)


def offset_bytes(table: Linear, config: QuantConfig) -> int:
    """Bytes of the offsets of a table's codes, which are float32: those of a head are rounded."""
    kept = isinstance(config, OwnCodes) or (isinstance(config, WeightOnly) and config.grid.shifted)
    return 4 * table.size // table.codes.block if kept and table.codes and table.codes.offsets else 0


def file_bytes(linear: Linear, config: QuantConfig) -> int:
    return 2 * linear.size if isinstance(config, Float16) else linear_bytes(linear, config)


def activation_bytes(geometry: Geometry, tokens: int, size: int) -> int:
    """Bytes of the activations of a call of so many tokens, whose values have ``size`` bytes."""
    return size * tokens * (WIDE_ARRAYS * geometry.widest + NARROW_ARRAYS * geometry.hidden_size)


def reference_bytes(part: Linear | Experts) -> int:
    """Bytes of a part in the reference, which makes floats of one expert in MXFP4 at a time."""
    if isinstance(part, Experts) and part.codes:
        return coded_bytes(part) + EXPERT_STEPS * 4 * part.size // part.count
    return REFERENCE_COPIES * 4 * part.size
