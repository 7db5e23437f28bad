"""Types of activations: the compute type everywhere, float32 where the contract says so."""

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import widen_outputs


def type_values(graph: ir.Graph, context: LoweringContext) -> int:
    """Declare what is computed, and the cache, in the compute type; widen the other outputs. Returns the casts made."""
    compute = ir.TensorType(context.type)
    for value in [*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = compute
    return 0 if context.compute == "float32" else widen_outputs(graph, context.type)
