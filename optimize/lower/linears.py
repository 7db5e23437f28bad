"""Every linear of a graph in turn, whatever the target makes of it."""

from collections.abc import Callable

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, nodes_of, replace


def replace_linears(graph: ir.Graph, context: LoweringContext, lowered: Callable[[Linear], ir.Value]) -> int:
    """llmc::Linear -> what ``lowered`` emits for it, each part reported as done. Counts the parts of packed ones."""
    count = 0
    for node in nodes_of(graph, "Linear", LLMC):
        linear = Linear.of(node)
        replace(node, lowered(linear))
        for _ in linear.weights:
            context.linear_done()
        count += len(linear.weights)
    return count
