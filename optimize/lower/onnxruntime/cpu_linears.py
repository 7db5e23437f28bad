"""Linears for ONNX Runtime on CPUs, one function for each QuantConfig."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.optimize.lower.context import Float16, Float32, LoweringContext, PerToken, Static, WeightOnly
from llmc.optimize.lower.linears import replace_linears
from llmc.optimize.lower.onnxruntime.linears import bias_of, emit_blocked_linear, float_linear, with_bias
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import (
    MICROSOFT,
    Emitter,
    constant,
    initializer,
    nodes_of,
    scalar,
    sole_consumer,
    vector,
)
from llmc.optimize.quantize import static
from llmc.optimize.quantize.grid import Float, Grid

# int8 arithmetic inside MatMulNBits; without it 8-bit weights are expanded to float32 on every call (165x slower).
ACCURACY_INT8 = 4
# A row of zeros would divide by zero; any smaller activation is below float32's resolution of the next layer anyway.
SMALLEST_ACTIVATION = 1e-9
# uint8 activations around this zero point.
MIDDLE = 128

# An activation's integers uint8 [M, K], and what turns products back: scales float32 [M, 1], or one scale.
Tokens = tuple[ir.Value, ir.Value]


def lower_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Linear -> the operator that its QuantConfig asks for. Counts the parts of packed ones."""
    activations: dict[ir.Value, Tokens] = {}
    return replace_linears(graph, context, lambda linear: _lower_linear(linear, context, activations))


def _lower_linear(linear: Linear, context: LoweringContext, activations: dict[ir.Value, Tokens]) -> ir.Value:
    """``activations`` are those that earlier linears quantized."""
    match context.quant.of(linear.module):
        case Float32():
            return float_linear(linear, "float32", context)
        case Float16():
            return float_linear(linear, "float16", context)
        case WeightOnly(grid):
            bias = bias_of(Emitter(linear.node).graph, linear, context) if linear.biases else None
            return emit_blocked_linear(linear, grid, context, bias, accuracy_level=ACCURACY_INT8)
        case PerToken(grid):
            return _per_token_linear(linear, grid, context, activations)
        case Static(grid):
            return _static_linear(linear, grid, context, activations)
        case config:
            raise BuildError(
                f"{linear.module} is to be stored as {config}, which the cpu target cannot; expected fp32, fp16, int8 "
                "or int4"
            )


def _per_token_linear(
    linear: Linear, grid: Grid, context: LoweringContext, activations: dict[ir.Value, Tokens]
) -> ir.Value:
    """y = (q @ W) * weight scale [N] * token scale [M]: the integer product is exact, so no row depends on another."""
    x = linear.node.inputs[0]
    assert x is not None
    if x not in activations:
        activations[x] = _quantize_tokens(linear, x)
    tokens, token_scales = activations[x]
    emit = Emitter(linear.node)
    product = _integer_product(emit, linear, grid, context, tokens, scalar(emit.graph, 1.0, np.float32))
    output = with_bias(emit, emit("Mul", product, token_scales), linear, context)
    return emit("Reshape", output, _rows_shape(emit))


def _static_linear(
    linear: Linear, grid: Grid, context: LoweringContext, activations: dict[ir.Value, Tokens]
) -> ir.Value:
    """y = (q @ W) * weight scale [N] * scale, with one scale for all activations, known before they are seen."""
    x, emit = linear.node.inputs[0], Emitter(linear.node)
    assert x is not None
    if x not in activations:
        found = static.activation_scale(context.calibrated.activation(linear.module))
        scale = constant(emit.graph, f"{linear.name}.input.scale", np.float32(found))
        flat = emit("Reshape", x, vector(emit.graph, [-1, linear.inputs]))
        activations[x] = emit("QuantizeLinear", flat, scale, scalar(emit.graph, MIDDLE, np.uint8)), scale
    tokens, scale = activations[x]
    output = with_bias(emit, _integer_product(emit, linear, grid, context, tokens, scale), linear, context)
    return emit("Reshape", output, _rows_shape(emit))


def _integer_product(
    emit: Emitter, linear: Linear, grid: Grid, context: LoweringContext, tokens: ir.Value, scale: ir.Value
) -> ir.Value:
    """(tokens - 128) @ W, exact in 32 bits, times weight scales [N] and ``scale``: float32 [M, N]."""

    def by_column() -> tuple[NDArray[np.int8], Float]:
        quantized = context.calibrated.quantize_stacked(linear.weights, grid)
        return quantized.values.T, quantized.scales[:, 0]

    names = (f"{linear.name}.int8", f"{linear.name}.int8.scales")
    weight, scales = (initializer(emit.graph, tensor) for tensor in context.weights.add(names, by_column))
    zero_point = scalar(emit.graph, MIDDLE, np.uint8)
    return emit("MatMulIntegerToFloat", tokens, weight, scale, scales, zero_point, domain=MICROSOFT)


def _quantize_tokens(linear: Linear, x: ir.Value) -> Tokens:
    """Activation x [B, S, K] -> uint8 [M, K] around 128 and its scales float32 [M, 1], M = B x S."""
    emit = Emitter(linear.node, f"{linear.name}.input")
    graph = emit.graph
    last = vector(graph, [-1])
    flat = emit("Reshape", x, vector(graph, [-1, linear.inputs]))
    # Two reductions read the activation twice; an Abs would write it as well.
    high, low = (emit(reduce, flat, last, keepdims=1) for reduce in ("ReduceMax", "ReduceMin"))
    largest = emit("Max", high, emit("Neg", low), scalar(graph, SMALLEST_ACTIVATION, np.float32))
    scales = emit("Mul", largest, scalar(graph, 1 / 127, np.float32))
    row_scales = emit("Squeeze", scales, last)
    zero_points = _once(graph, "activation.zero_points", lambda: _zero_points(emit))
    return emit("QuantizeLinear", flat, row_scales, zero_points, axis=0), scales


def _zero_points(emit: Emitter) -> ir.Value:
    """128 for each row, uint8 [M]; from the ids alone, so that no part of the graph hangs on the first layer's."""
    rows = emit("Shape", emit("Reshape", emit.graph.inputs[0], vector(emit.graph, [-1])))
    return emit("Expand", vector(emit.graph, [MIDDLE], np.uint8), rows)


def defer_token_scales(graph: ir.Graph, _: LoweringContext) -> int:
    """Mul(a, y * scales) -> quantize  becomes  Mul(a, y) -> quantize, with the scales multiplied in after the product.

    Quantization per token does not see a factor per token, so the widest multiplication of each layer goes away.
    """
    count = 0
    for gate in nodes_of(graph, "Mul"):
        reshape = _find_producer("Reshape", gate.inputs[1])
        scaled = _find_producer("Mul", reshape.inputs[0]) if reshape is not None else None
        flat = sole_consumer(gate.outputs[0])
        quantize = flat and next((user for user, _ in flat.outputs[0].uses() if user.op_type == "QuantizeLinear"), None)
        if not flat or flat.op_type != "Reshape" or not reshape or not scaled or not quantize:
            continue
        squeeze = _find_producer("Squeeze", quantize.inputs[1])
        if sole_consumer(reshape.outputs[0]) is not gate or squeeze is None:
            continue
        assert squeeze.inputs[0] is not None
        product, scales = scaled.inputs
        reshape.replace_input_with(0, product)
        own = squeeze.inputs[0]
        for user, index in list(own.uses()):
            if user is not squeeze:
                user.replace_input_with(index, Emitter(user, f"{user.name}.scales")("Mul", own, scales))
        count += 1
    return count


def _find_producer(operator: str, value: ir.Value | None) -> ir.Node | None:
    """The node that computes ``value``, if it is of that kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _rows_shape(emit: Emitter) -> ir.Value:
    """The shape (batch, sequence, -1) that turns [M, N] back into [B, S, N]."""
    ids = emit.graph.inputs[0]
    return _once(
        emit.graph, "activation.rows", lambda: emit("Concat", emit("Shape", ids), vector(emit.graph, [-1]), axis=0)
    )


def _once(graph: ir.Graph, key: str, make: Callable[[], ir.Value]) -> ir.Value:
    """A value made by its first user, in front of it, and shared by all later ones."""
    if key not in graph.meta:
        graph.meta[key] = make()
    value: ir.Value = graph.meta[key]
    return value
