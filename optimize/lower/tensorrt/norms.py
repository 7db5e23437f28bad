"""Norms of TensorRT from 10.15 on: RMSNormalization stays, with weights in the compute type; it sums in float32."""

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import constant, nodes_of
from llmc.optimize.lower.tensorrt.weights import narrowed


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """Give each RMSNormalization its weight in the compute type."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor = stored(norm.inputs[1])
        weight = narrowed(context.calibrated.rows(tensor), context.compute, tensor.name or "")
        norm.replace_input_with(1, constant(graph, f"{tensor.name}.{context.compute}", weight))
        count += 1
    return count
