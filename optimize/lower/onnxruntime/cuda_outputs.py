"""The end of the graph on GPUs: which rows get logits, and float32 for the host."""

import numpy as np
import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.cuda_attention import sequence_lengths
from llmc.optimize.lower.rewrite import Emitter, graph_input, nodes_of, replace, scalar, vector, widen_outputs


def gather_logit_rows(graph: ir.Graph, context: LoweringContext) -> int:
    """GatherND(hidden [B, S, N], indices [B, O]) -> Gather from rows [B * S, N].

    GatherND's CUDA kernel copies sizes from host memory that is gone when a recorded graph is repeated.
    """
    count = 0
    for node in nodes_of(graph, "GatherND"):
        emit = Emitter(node, main="Gather")
        flat = emit("Reshape", node.inputs[0], vector(graph, [-1, context.geometry.hidden_size]))
        lengths = sequence_lengths(graph, Emitter(node, "positions"))
        firsts = emit("CumSum", lengths, scalar(graph, 0, np.int64), exclusive=1)
        column = emit("Unsqueeze", firsts, vector(graph, [1]))
        rows = emit("Add", graph_input(graph, "logit_indices"), column)
        replace(node, emit("Gather", flat, rows, axis=0))
        count += 1
    return count


def float32_outputs(graph: ir.Graph, context: LoweringContext) -> int:
    """Logits and hidden states as float32, where the graph computes in another type."""
    if context.compute == "float32":
        return 0
    _forget_types(graph)
    return widen_outputs(graph, context.type)


def _forget_types(graph: ir.Graph) -> None:
    """The exporter noted types between nodes, for float32; an engine infers them."""
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
