"""Linears for TensorRT: a MatMul with weights [K, N], explicitly dequantized where they are stored in fewer bits."""

import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import Computed, LoweringContext, QuantConfig, Static, WeightOnly
from llmc.optimize.lower.linears import replace_linears
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import Emitter, constant, initializer
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.quantize.ranges import activation_scale


def lower_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Linear -> MatMul [+ Add], with QuantizeLinear and DequantizeLinear as its QuantConfig asks.

    Counts the parts of packed ones.
    """
    rounded: dict[ir.Value, ir.Value] = {}
    return replace_linears(graph, context, lambda linear: _lower_linear(linear, context, rounded))


def _lower_linear(linear: Linear, context: LoweringContext, rounded: dict[ir.Value, ir.Value]) -> ir.Value:
    """``rounded`` are the inputs that earlier linears rounded."""
    x, config, emit = linear.node.inputs[0], context.quant.of(linear.module), Emitter(linear.node)
    assert x is not None
    if isinstance(config, Static):
        if x not in rounded:
            rounded[x] = _round_input(linear, x, context)
        x = rounded[x]
    output = emit("MatMul", x, _weight(Emitter(linear.node, f"{linear.name}.weight"), linear, config, context))
    return emit("Add", output, _bias(emit.graph, linear, context)) if linear.biases else output


def _weight(emit: Emitter, linear: Linear, config: QuantConfig, context: LoweringContext) -> ir.Value:
    graph = emit.graph
    match config:
        case Computed() if linear.weights[0].name == weights.TABLE:
            # The head of a tied model reads the embedding's own bytes.
            return emit("Transpose", initializer(graph, weights.float_rows(linear.weights[0], context)), perm=[1, 0])
        case Computed():
            return initializer(graph, weights.float_columns(linear, context))
        case WeightOnly(grid) | Static(grid) if (grid.bits, bool(grid.block)) in ((8, False), (4, True)):
            fitted = weights.fit_grid(grid, linear.inputs, linear.module)
            if fitted != grid:
                graph.metadata_props[f"llmc.block.{linear.name}"] = str(fitted.block)
            stored = [initializer(graph, it) for it in weights.integer_columns(linear, fitted, context)]
            if fitted.block:
                return emit("DequantizeLinear", *stored, axis=0, block_size=fitted.block)
            return emit("DequantizeLinear", *stored, axis=1)
    raise BuildError(
        f"{linear.module}: TensorRT takes no weights stored as {config}; expected floats, int8 with a scale per output "
        "or int4 in blocks"
    )


def _round_input(linear: Linear, x: ir.Value, context: LoweringContext) -> ir.Value:
    emit = Emitter(linear.node, f"{linear.name}.input")
    scale = activation_scale(context.calibrated.activation(linear.module))
    held = weights.round_scales(np.array(scale, np.float32), context.array_type)
    scale_value = constant(emit.graph, f"{emit.name}.scale", held)
    zero_value = constant(emit.graph, "const.int8.zero", np.array(0, np.int8))
    rounded = emit("QuantizeLinear", x, scale_value, zero_value)
    return emit("DequantizeLinear", rounded, scale_value, zero_value)


def _bias(graph: ir.Graph, linear: Linear, context: LoweringContext) -> ir.Value:
    bias = weights.narrow_values(context.calibrated.matrix(linear.biases), context.compute, f"{linear.name}.bias")
    return constant(graph, f"{linear.name}.bias.{context.compute}", bias)
