"""Linears that both providers of ONNX Runtime have: float products, biases, integers in blocks; and CUDA's choice."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.names import HEAD
from llmc.errors import BuildError
from llmc.exported import Weight, sizes
from llmc.optimize.lower.context import Computed, Float16, Float32, LoweringContext, WeightOnly
from llmc.optimize.lower.linears import replace_linears
from llmc.optimize.lower.onnxruntime.offsets import add_offsets, pack_offsets
from llmc.optimize.lower.onnxruntime.rotation import count_mixed, mix, read_bias, read_weights
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, emit_conversion, initializer, vector
from llmc.optimize.quantize.grid import Float, Grid, Quantized, pack_blocks, pack_rows
from llmc.optimize.weights.store import grid_name, quantize_matrix


def lower_cuda_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Linear -> the operator that its QuantConfig asks for on a GPU. Counts the parts of packed ones."""
    return replace_linears(graph, context, lambda linear: _cuda_linear(linear, context))


def _cuda_linear(linear: Linear, context: LoweringContext) -> ir.Value:
    match context.quant.of(linear.module):
        case Float32():
            return float_linear(linear, "float32", context)
        case Float16():
            return float_linear(linear, "float16", context)
        case Computed():
            return float_linear(linear, context.compute, context)
        case WeightOnly(grid) if grid.block:
            product = emit_blocked_linear(linear, grid, context)  # not every version adds a bias inside of it
            return with_bias(Emitter(linear.node), product, linear, context, context.type)
        case config:
            raise BuildError(
                f"{linear.module} is to be stored as {config}, which the cuda target cannot; expected fp32, fp16, int8 "
                "or int4"
            )


def float_linear(linear: Linear, dtype: str, context: LoweringContext) -> ir.Value:
    """A product with weights of type ``dtype``, in float32, or in float16 where weights and activations both are.

    Of float16 weights in a float32 graph the engine makes float32 when it loads them: half the file, no less memory.
    """
    name = f"{linear.tensor}.rotated" if _is_turned(linear, context) else linear.tensor
    stored = _store_floats(name, linear.weights, lambda: read_weights(linear, context), dtype, context)
    emit = Emitter(linear.node)
    x, activations = linear.node.inputs[0], context.type
    assert x is not None
    arithmetic = stored.dtype if stored.dtype == activations else ir.DataType.FLOAT
    weight = emit_conversion(emit, initializer(emit.graph, stored), stored.dtype, arithmetic)
    x = emit_conversion(emit, x, activations, arithmetic)
    output = with_bias(emit, emit("FusedMatMul", x, weight, domain=MICROSOFT, transB=1), linear, context, arithmetic)
    return emit_conversion(emit, output, arithmetic, activations)


def with_bias(
    emit: Emitter, output: ir.Value, linear: Linear, context: LoweringContext, dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    """``output`` and the linear's bias, if it has one, added in the type ``dtype``."""
    return emit("Add", output, bias_of(emit.graph, linear, context, dtype)) if linear.biases else output


def bias_of(
    graph: ir.Graph, linear: Linear, context: LoweringContext, dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    kind = dtype.numpy()
    return constant(graph, f"{linear.name}.bias.{kind.name}", read_bias(linear, context).astype(kind))


def emit_blocked_linear(
    linear: Linear,
    grid: Grid,
    context: LoweringContext,
    bias: ir.Value | None = None,
    parts: int = 1,
    **attributes: int,
) -> ir.Value:
    """MatMulNBits with scales in the type of the activations, ``bias`` included, in ``parts`` that each compute some of
    the outputs."""
    emit, x = Emitter(linear.node, main="MatMulNBits"), linear.node.inputs[0]
    assert x is not None
    block = count_mixed(linear.module, linear.inputs) if context.rotated else 0
    if block:
        x = emit("Reshape", mix(emit, x, block), vector(emit.graph, [0, 0, -1]))
    stored = (
        _pack_rotated(linear, grid, context, block)
        if _is_turned(linear, context)
        else pack_linear(linear.weights, grid, context)
    )
    assert parts == 1 or bias is None
    weights, terms = (stored[:2], stored[2:]) if grid.shifted else (stored, [])
    products = []
    for part in range(parts):
        views = [context.weights.view(it, (linear.outputs // parts, *sizes(it)[1:]), part) for it in weights]
        weight, scales, *zeros = [initializer(emit.graph, it) for it in (views if parts > 1 else weights)]
        optional: list[ir.Value | None] = [zeros[0] if zeros else None, None, bias]
        while optional and optional[-1] is None:
            optional.pop()
        made = emit(
            "MatMulNBits",
            *(x, weight, scales, *optional),
            domain=MICROSOFT,
            K=linear.inputs,
            N=linear.outputs // parts,
            bits=grid.bits,
            block_size=grid.block,
            **attributes,
        )
        products.append(made)
    product = emit("Concat", *products, axis=-1) if parts > 1 else products[0]
    offsets = [initializer(emit.graph, it) for it in terms]
    return add_offsets(product, linear, grid, offsets, **attributes) if grid.shifted else product


def _is_turned(linear: Linear, context: LoweringContext) -> bool:
    """True if the weights are rotated, and so not shared with other graphs. The head reads the stream rotated back."""
    return context.rotated and linear.module != HEAD


def _pack_rotated(linear: Linear, grid: Grid, context: LoweringContext, block: int) -> list[ir.ExternalTensor]:
    """:func:`pack_linear` of a linear in the basis of the graph, of which ``block`` inputs at a time are mixed."""
    name = f"{linear.tensor}.rotated.{grid_name(grid)}"

    def make() -> list[NDArray[np.generic]]:
        return _pack(quantize_matrix(read_weights(linear, context, block), grid), context)

    return context.weights.add([name, f"{name}.scales", *([] if grid.symmetric else [f"{name}.zeros"])], make)


def pack_linear(weights: tuple[Weight, ...], grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Packed weights uint8 [N, groups, bytes], scales [N, groups] and, on an asymmetric grid, packed zero points; on a
    shifted one packed offsets and their scales."""
    name = f"{'+'.join(weight.name or '' for weight in weights)}.{grid_name(grid)}"
    scales = f"{name}.scales" if context.compute == "float32" else f"{name}.scales.{context.compute}"
    names = [name, scales, *([] if grid.symmetric else [f"{name}.zeros"])]
    names += [f"{name}.offsets", f"{name}.offsets.scales.{context.compute}"] if grid.shifted else []

    return context.weights.add(names, lambda: _pack(context.calibrated.quantize_stacked(weights, grid), context))


def _pack(quantized: Quantized, context: LoweringContext) -> list[NDArray[np.generic]]:
    """The arrays of a quantized matrix, see :func:`pack_linear`."""
    arrays: list[NDArray[np.generic]] = [
        pack_blocks(quantized.values, quantized.grid),
        quantized.scales.astype(context.compute, copy=False),
    ]
    if quantized.zero_points is not None:
        arrays.append(pack_rows(quantized.zero_points, quantized.grid))
    if quantized.offsets is not None:
        arrays += pack_offsets(quantized.offsets, context)
    return arrays


def float_table(table: Weight, dtype: str, context: LoweringContext) -> ir.ExternalTensor:
    """A table [N, K] as float32 or float16; a weight beyond float16's range raises BuildError."""
    return _store_floats(table.name or "", (table,), lambda: context.calibrated.rows(table), dtype, context)


def _store_floats(
    name: str, weights: tuple[Weight, ...], read: Callable[[], Float], dtype: str, context: LoweringContext
) -> ir.ExternalTensor:
    def make() -> list[NDArray[np.generic]]:
        values = read()
        if dtype == "float16" and float(np.abs(values).max()) > float(np.finfo(np.float16).max):
            beyond = (w.name for w in weights if np.abs(context.calibrated.rows(w)).max() > np.finfo(np.float16).max)
            raise BuildError(
                f"{next(beyond, name)} holds weights beyond float16's 65504; keep it in fp32 with a layers pattern"
            )
        return [values.astype(dtype, copy=False)]

    (weight,) = context.weights.add([f"{name}.{dtype}"], make)
    return weight
