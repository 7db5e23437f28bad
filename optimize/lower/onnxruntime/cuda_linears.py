"""Linears for ONNX Runtime on GPUs: products in the type of the activations, integer weights in blocks."""

import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import Computed, Float16, Float32, LoweringContext, WeightOnly
from llmc.optimize.lower.linears import replace_linears
from llmc.optimize.lower.onnxruntime.linears import (
    blocked_linear,
    float_linear,
    with_bias,
)
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import Emitter


def lower_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Linear -> the operator that its QuantConfig asks for. Counts the parts of packed ones."""
    return replace_linears(graph, context, lambda linear: _lowered(linear, context))


def _lowered(linear: Linear, context: LoweringContext) -> ir.Value:
    config = context.quant.of(linear.module)
    if isinstance(config, Computed):
        config = Float16() if context.compute == "float16" else Float32()
    match config:
        case Float32():
            return float_linear(linear, "float32", context)
        case Float16():
            return float_linear(linear, "float16", context)
        case WeightOnly(grid) if grid.block:
            product = blocked_linear(linear, grid, context)  # not every version adds a bias inside of it
            return with_bias(Emitter(linear.node), product, linear, context, context.type)
    raise BuildError(
        f"{linear.module} is to be stored as {config}, which the cuda target cannot; expected fp32, fp16, int8 or int4"
    )
