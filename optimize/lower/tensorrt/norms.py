"""Norms of TensorRT from 10.15 on: RMSNormalization stays, with weights in the compute type; it sums in float32."""

import onnx_ir as ir

from llmc.optimize.lower.context import Plan
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import constant, nodes_of
from llmc.optimize.lower.tensorrt.weights import narrowed


def lower_norms(graph: ir.Graph, plan: Plan) -> int:
    """Give each RMSNormalization its weight in the compute type."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor = stored(norm.inputs[1])
        weight = narrowed(plan.calibrated.rows(tensor), plan.compute, tensor.name or "")
        norm.replace_input_with(1, constant(graph, f"{tensor.name}.{plan.compute}", weight))
        count += 1
    return count
