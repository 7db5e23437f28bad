"""Parts of linears that both providers of ONNX Runtime have: float products, biases, and weights as they are stored."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.optimize.calibrate.store import grid_name
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, initializer
from llmc.optimize.quantize.grid import Grid, pack_blocks, pack_zero_points


def float_linear(linear: Linear, stored: ir.ExternalTensor, context: LoweringContext) -> ir.Value:
    """A product in float32, or in float16 where weights and activations both are.

    Of float16 weights in a float32 graph the engine makes float32 when it loads them: half the file, no less memory.
    """
    emit = Emitter(linear.node)
    x, activations = linear.node.inputs[0], context.type
    assert x is not None
    arithmetic = stored.dtype if stored.dtype == activations else ir.DataType.FLOAT
    weight = converted(emit, initializer(emit.graph, stored), stored.dtype, arithmetic)
    x = converted(emit, x, activations, arithmetic)
    output = with_bias(emit, emit("FusedMatMul", x, weight, domain=MICROSOFT, transB=1), linear, context, arithmetic)
    return converted(emit, output, arithmetic, activations)


def converted(emit: Emitter, value: ir.Value, before: ir.DataType, after: ir.DataType) -> ir.Value:
    """``value`` as the type ``after``; it is ``before`` now."""
    return value if before == after else emit("Cast", value, to=after)


def with_bias(
    emit: Emitter, output: ir.Value, linear: Linear, context: LoweringContext, dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    """``output`` and the linear's bias, if it has one, added in the type ``dtype``."""
    return emit("Add", output, bias_of(emit.graph, linear, context, dtype)) if linear.biases else output


def bias_of(
    graph: ir.Graph, linear: Linear, context: LoweringContext, dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    kind = dtype.numpy()
    return constant(graph, f"{linear.name}.bias.{kind.name}", context.calibrated.matrix(linear.biases).astype(kind))


def blocked(weights: tuple[ir.ExternalTensor, ...], grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Packed weights uint8 [N, groups, bytes], scales [N, groups] and, on an asymmetric grid, packed zero points."""
    name = f"{'+'.join(weight.name or '' for weight in weights)}.{grid_name(grid)}"
    scales = f"{name}.scales" if context.compute == "float32" else f"{name}.scales.{context.compute}"
    names = [name, scales, *([] if grid.symmetric else [f"{name}.zeros"])]

    def make() -> list[NDArray[np.generic]]:
        quantized = context.calibrated.quantized(weights, grid)
        scales = quantized.scales.astype(context.compute, copy=False)
        arrays: list[NDArray[np.generic]] = [pack_blocks(quantized.values, grid), scales]
        if quantized.zero_points is not None:
            arrays.append(pack_zero_points(quantized.zero_points, grid))
        return arrays

    return context.weights.add(names, make)


def float32_weight(name: str, weights: tuple[ir.ExternalTensor, ...], context: LoweringContext) -> ir.ExternalTensor:
    """Stacked matrices as float32 [N, K]."""
    (weight,) = context.weights.add([f"{name}.float32"], lambda: [context.calibrated.matrix(weights)])
    return weight


def float16_weight(name: str, weights: tuple[ir.ExternalTensor, ...], context: LoweringContext) -> ir.ExternalTensor:
    """Stacked matrices as float16 [N, K].

    Raises:
        BuildError: a weight is beyond float16's range.
    """

    def make() -> list[NDArray[np.float16]]:
        values = context.calibrated.matrix(weights)
        if float(np.abs(values).max()) > float(np.finfo(np.float16).max):
            raise BuildError(f"{name} holds weights beyond float16's 65504; keep it in fp32 with a layers pattern")
        return [values.astype(np.float16)]

    (weight,) = context.weights.add([f"{name}.float16"], make)
    return weight
