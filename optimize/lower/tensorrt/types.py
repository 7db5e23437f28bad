"""Types of activations: the compute type everywhere, float32 where the contract says so."""

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import unique
from llmc.optimize.lower.tensorrt.weights import compute_type

FLOAT32_OUTPUTS = ("logits", "hidden_states")


def type_values(graph: ir.Graph, context: LoweringContext) -> int:
    """Declare what is computed, and the cache, in the compute type; widen the other outputs. Returns the casts made."""
    compute = ir.TensorType(compute_type(context))
    for value in [*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = compute
    if context.compute == "float32":
        return 0
    outputs = [(i, value) for i, value in enumerate(graph.outputs) if value.name in FLOAT32_OUTPUTS]
    for index, value in outputs:
        graph.outputs[index] = _widened(graph, value)
    return len(outputs)


def _widened(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """A float32 copy of ``value`` that takes its name."""
    node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    output = node.outputs[0]
    node.name = unique(graph, f"{value.name}.Cast")
    output.name, value.name = value.name, f"{value.name}.narrow"
    output.shape, output.type = value.shape, ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    return output
