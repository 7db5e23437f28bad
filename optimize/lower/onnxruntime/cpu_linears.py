"""Linears for ONNX Runtime on CPUs, one function for each QuantConfig."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.names import HEAD
from llmc.errors import BuildError
from llmc.exported import CodedTensor
from llmc.optimize.lower.context import Float16, Float32, LoweringContext, PerToken, WeightOnly
from llmc.optimize.lower.linears import replace_linears
from llmc.optimize.lower.onnxruntime.linears import bias_of, emit_blocked_linear, float_linear, with_bias
from llmc.optimize.lower.onnxruntime.rotation import count_mixed, mix, read_weights
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import (
    MICROSOFT,
    Emitter,
    graph_input,
    initializer,
    nodes_of,
    scalar,
    sole_consumer,
    vector,
)
from llmc.optimize.quantize.grid import Grid, stack
from llmc.optimize.weights.store import PROMPTS, quantize_matrix

# int8 arithmetic inside MatMulNBits; without it 8-bit weights are expanded to float32 on every call (165x slower).
ACCURACY_INT8 = 4
# A row of zeros would divide by zero; any smaller activation is below float32's resolution of the next layer anyway.
SMALLEST_ACTIVATION = 1e-9
# Zero point of uint8 activations and weights.
MIDDLE = 128

# 152,000 tokens of 896 values in 8 bits are 136 MB, twice at the peak of a load; a step takes the same time to 1 %.
HEAD_PARTS, LARGE_BITS = 4, 8 * 2**25

# An activation's integers, uint8 [M, K], and their scales float32 [M, 1].
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
            # While the engine packs a part of a large head, its bytes are in memory twice.
            large = linear.module == HEAD and linear.outputs * linear.inputs * grid.bits >= LARGE_BITS
            parts = HEAD_PARTS if large and not linear.biases and linear.outputs % HEAD_PARTS == 0 else 1
            return emit_blocked_linear(linear, grid, context, bias, parts, accuracy_level=ACCURACY_INT8)
        case PerToken(grid):
            return _per_token_linear(linear, grid, context, activations)
        case config:
            raise BuildError(
                f"{linear.module} is to be stored as {config}, which the cpu target cannot; expected fp32, fp16, int8 "
                "or int4"
            )


def _per_token_linear(
    linear: Linear, grid: Grid, context: LoweringContext, activations: dict[ir.Value, Tokens]
) -> ir.Value:
    """y = (q @ W) * weight scale [N] * token scale [M, 1]: integer products are exact, so no row depends on another."""
    x, calibrated, kind = linear.node.inputs[0], context.calibrated, f"{linear.name}.int8"
    assert x is not None
    emit, rows = Emitter(linear.node), _rows_before(linear, context)
    keeps = all(isinstance(weight, CodedTensor) and calibrated.keeps(weight, grid) for weight in linear.weights)
    encodes = context.geometry.encoder is not None
    block = 0 if keeps else count_mixed(linear.module, linear.inputs, encodes)
    if x not in activations:
        activations[x] = _quantize_tokens(linear, x, block, rows)
    tokens, token_scales = activations[x]

    def make() -> list[NDArray[np.generic]]:
        """Weights [K, N], int8 or uint8 around 128, and scales [N], for inputs mixed in blocks of ``block``."""
        if keeps:
            quantized = calibrated.quantize_stacked(linear.weights, grid)
        else:
            parts = [calibrated.chosen(weight.name or "", grid, PROMPTS) for weight in linear.weights]
            chosen = [part for part in parts if part is not None]
            complete = len(chosen) == len(parts)
            quantized = stack(chosen) if complete else quantize_matrix(read_weights(linear, context, block), grid)
        values = quantized.values.T
        return [values.view(np.uint8) ^ MIDDLE if context.unsigned else values, quantized.scales[:, 0]]

    weight, scales = (initializer(emit.graph, it) for it in context.weights.add([kind, f"{kind}.scales"], make))
    one, zero_point = scalar(emit.graph, 1.0, np.float32), scalar(emit.graph, MIDDLE, np.uint8)
    zero_points = (zero_point, zero_point) if context.unsigned else (zero_point,)
    product = emit("MatMulIntegerToFloat", tokens, weight, one, scales, *zero_points, domain=MICROSOFT)  # (M, N)
    output = with_bias(emit, emit("Mul", product, token_scales), linear, context)
    end = vector(emit.graph, [-1])
    shape = _once(emit.graph, f"activation.rows.{rows.name}", lambda: emit("Concat", emit("Shape", rows), end, axis=0))
    return emit("Reshape", output, shape)  # (B, S, N)


def _rows_before(linear: Linear, context: LoweringContext) -> ir.Value:
    """A value [B, S] with as many elements as the linear has rows: the ids, or ``logit_indices`` if the layer reads
    another layer's cache; [B] behind the pooling of an encoder."""
    graph, listed = linear.node.graph, context.geometry.linear[linear.module]
    assert graph is not None
    if listed.layer is None and context.geometry.encoder is not None:
        return graph_input(graph, "lengths")
    shared = listed.layer is not None and context.geometry.source_of(listed.layer)
    rows: ir.Value = graph.meta["asked"] if shared else graph.inputs[0]
    return rows


def _quantize_tokens(linear: Linear, x: ir.Value, block: int, rows: ir.Value) -> Tokens:
    """Activation x [B, S, K], of which ``block`` values at a time are mixed -> uint8 [M, K] around 128 and scales
    float32 [M, 1], M = B x S."""
    emit = Emitter(linear.node, f"{linear.name}.input")
    graph, last = emit.graph, vector(emit.graph, [-1])
    flat = emit("Reshape", mix(emit, x, block) if block else x, vector(graph, [-1, linear.inputs]))
    # Two reductions read the activation twice; an Abs would write it as well.
    high, low = (emit(reduce, flat, last, keepdims=1) for reduce in ("ReduceMax", "ReduceMin"))
    largest = emit("Max", high, emit("Neg", low), scalar(graph, SMALLEST_ACTIVATION, np.float32))
    scales = emit("Mul", largest, scalar(graph, 1 / 127, np.float32))
    row_scales = emit("Squeeze", scales, last)

    def make() -> ir.Value:
        """128 for each row, uint8 [M], computed from ids or indices only, so that no layer depends on the first one."""
        count = emit("Shape", emit("Reshape", rows, last))
        return emit("Expand", vector(graph, [MIDDLE], np.uint8), count)

    zero_points = _once(graph, f"activation.zero_points.{rows.name}", make)
    return emit("QuantizeLinear", flat, row_scales, zero_points, axis=0), scales


def defer_token_scales(graph: ir.Graph, _: LoweringContext) -> int:
    """Mul(a, y * scales) -> quantize  becomes  Mul(a, y) -> quantize, with the scales multiplied in after the product.

    Quantization per token does not see a factor per token, so the widest multiplication of each layer goes away.
    """
    count = 0
    for gate in nodes_of(graph, "Mul"):
        reshape = _find_producer("Reshape", gate.inputs[1])
        scaled = _find_producer("Mul", reshape.inputs[0]) if reshape is not None else None
        own = _find_token_scales(gate.outputs[0])
        if not reshape or not scaled or not own or sole_consumer(reshape.outputs[0]) is not gate:
            continue
        product, scales = scaled.inputs
        reshape.replace_input_with(0, product)
        for user, index in list(own.uses()):
            if user.op_type != "Squeeze":
                user.replace_input_with(index, Emitter(user, f"{user.name}.scales")("Mul", own, scales))
        count += 1
    return count


def _find_token_scales(value: ir.Value) -> ir.Value | None:
    """The scales [M, 1] with which ``value`` is quantized per token, if nothing else reads it."""
    while (node := sole_consumer(value)) is not None and node.op_type in ("Reshape", "MatMul"):
        value = node.outputs[0]
    quantize = next((user for user, _ in value.uses() if user.op_type == "QuantizeLinear"), None)
    squeeze = _find_producer("Squeeze", quantize.inputs[1]) if quantize else None
    return squeeze.inputs[0] if squeeze is not None else None


def _find_producer(operator: str, value: ir.Value | None) -> ir.Node | None:
    """The node that computes ``value``, if it is of that kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _once(graph: ir.Graph, key: str, make: Callable[[], ir.Value]) -> ir.Value:
    """A value made by its first user, in front of it, and shared by all later ones."""
    if key not in graph.meta:
        graph.meta[key] = make()
    value: ir.Value = graph.meta[key]
    return value
