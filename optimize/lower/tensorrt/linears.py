"""Linears for TensorRT: a MatMul with weights [K, N], explicitly dequantized where they are stored in fewer bits."""

import ml_dtypes
import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import Computed, Float8, Form, Plan, Static, WeightOnly
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, Emitter, constant, initializer, nodes_of, replace
from llmc.optimize.lower.tensorrt import weights
from llmc.optimize.quantize import static
from llmc.optimize.quantize.grid import Grid


def lower_linears(graph: ir.Graph, plan: Plan) -> int:
    """llmc::Linear -> MatMul [+ Add], with QuantizeLinear and DequantizeLinear as the form of its weights asks.

    Counts the parts of packed ones.
    """
    quantized: dict[ir.Value, ir.Value] = {}
    count = 0
    for node in nodes_of(graph, "Linear", LLMC):
        linear, x = Linear.of(node), node.inputs[0]
        assert x is not None
        form = plan.forms.of(linear.module)
        if isinstance(form, Static) or (isinstance(form, Float8) and form.activations):
            if x not in quantized:
                quantized[x] = _rounded_input(linear, x, form, plan)
            x = quantized[x]
        emit = Emitter(node)
        output = emit("MatMul", x, _weight(Emitter(node, f"{linear.name}.weight"), linear, form, plan))
        if linear.biases:
            output = emit("Add", output, _bias(graph, linear, plan))
        replace(node, output)
        for _ in linear.weights:
            plan.linear_done()
        count += len(linear.weights)
    return count


def _weight(emit: Emitter, linear: Linear, form: Form, plan: Plan) -> ir.Value:
    """The weights [K, N] in the compute type."""
    graph = emit.graph
    match form:
        case Computed() if linear.weights[0].name == weights.EMBEDDING:
            # The head of a tied model reads the embedding's own bytes.
            return emit("Transpose", initializer(graph, weights.float_rows(linear.weights[0], plan)), perm=[1, 0])
        case Computed():
            return initializer(graph, weights.float_columns(linear, plan))
        case Float8():
            stored, scales = (initializer(graph, tensor) for tensor in weights.float8_columns(linear, plan))
            return emit("DequantizeLinear", stored, scales, axis=1)
        case WeightOnly(grid) | Static(grid) if (grid.bits, bool(grid.block)) in ((8, False), (4, True)):
            return _dequantized(emit, linear, _recorded(graph, linear, grid), plan)
    raise BuildError(
        f"{linear.module}: TensorRT takes no weights stored as {form}; expected floats, float8, int8 with a scale per "
        "output or int4 in blocks"
    )


def _dequantized(emit: Emitter, linear: Linear, grid: Grid, plan: Plan) -> ir.Value:
    stored, scales = (initializer(emit.graph, tensor) for tensor in weights.integer_columns(linear, grid, plan))
    if grid.block:
        return emit("DequantizeLinear", stored, scales, axis=0, block_size=grid.block)
    return emit("DequantizeLinear", stored, scales, axis=1)


def _recorded(graph: ir.Graph, linear: Linear, grid: Grid) -> Grid:
    """The grid with a block that divides the inputs; where that is another one, the graph's metadata say so."""
    found = weights.fitted(grid, linear.inputs, linear.module)
    if found != grid:
        graph.metadata_props[f"llmc.block.{linear.name}"] = str(found.block)
    return found


def _rounded_input(linear: Linear, x: ir.Value, form: Static | Float8, plan: Plan) -> ir.Value:
    """The activation rounded to int8 or float8 with one scale that calibration found."""
    emit = Emitter(linear.node, f"{linear.name}.input")
    largest = plan.calibrated.activation(linear.module)
    if isinstance(form, Float8):
        scale, zero = static.activation_scale(largest) * static.LARGEST / weights.LARGEST_FLOAT8, _FLOAT8_ZERO
    else:
        scale, zero = static.activation_scale(largest), _INT8_ZERO
    held = weights.stored_scales(np.array(scale, np.float32), weights.ARRAY_TYPES[plan.compute])
    scale_value = constant(emit.graph, f"{emit.name}.scale", held)
    zero_value = constant(emit.graph, f"const.{zero.dtype.name}.zero", zero)
    rounded = emit("QuantizeLinear", x, scale_value, zero_value)
    return emit("DequantizeLinear", rounded, scale_value, zero_value)


_INT8_ZERO = np.array(0, np.int8)
_FLOAT8_ZERO = np.array(0, ml_dtypes.float8_e4m3fn)


def _bias(graph: ir.Graph, linear: Linear, plan: Plan) -> ir.Value:
    bias = weights.narrowed(plan.calibrated.matrix(linear.biases), plan.compute, f"{linear.name}.bias")
    return constant(graph, f"{linear.name}.bias.{plan.compute}", bias)
