"""Attention, and which rows get logits, for ONNX Runtime on GPUs, so that a CUDA graph can be recorded.

ONNX Runtime records no copies between host and device: what follows from lengths is computed on the device, without
Shape, and what attention's host code must know is taken from the cache's shape. Source: docs/OperatorKernels.md and the
CUDA kernels of ONNX Runtime. Not run on a GPU yet.
"""

import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import emit_token_counts, group_query_attention, rotate_before
from llmc.optimize.lower.onnxruntime.basic_attention import Shared, basic_attention
from llmc.optimize.lower.rewrite import LLMC, Emitter, graph_input, nodes_of, replace, scalar, vector


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> GroupQueryAttention over shared buffers, or basic operators where it has no kernel."""
    rotate_before(graph, context)
    if context.compute == "float16":
        return group_query_attention(graph, context, _lengths)
    if context.compute == "float32":  # the CUDA provider has GroupQueryAttention for 16 bits only
        return _basic_attention(graph, context)
    raise BuildError(f"the cuda target computes in float16 or float32, not in {context.compute}; change compute")


def _sequence_lengths(graph: ir.Graph, emit: Emitter) -> ir.Value:
    """S for each row, int64 [B], on the device."""
    return emit("Gather", emit_token_counts(graph), scalar(graph, -1, np.int64), axis=1)


def _lengths(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    """``seqlens_k`` int32 [B] on the device, and ``total_sequence_length`` int32 [1] on the host: the capacity."""
    emit = Emitter(first, "positions")
    totals = emit("Add", graph_input(graph, "past_lengths"), _sequence_lengths(graph, emit))
    last = emit("Sub", totals, scalar(graph, 1, np.int64))
    return [emit("Cast", value, to=ir.DataType.INT32) for value in (last, _capacity(emit))]


def _capacity(emit: Emitter) -> ir.Value:
    """The cache's capacity, int64 [1], from that of the attention before which ``emit`` emits."""
    return emit("Shape", emit.anchor.inputs[3], start=2, end=3)


# -------------------------------------------------------------------------------------------------- basic operators


def _basic_attention(graph: ir.Graph, context: LoweringContext) -> int:
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if attentions:
        shared = Shared.before(attentions[0], _Cache())
        for node in attentions:
            replace(node, *basic_attention(node, shared, context))
    return len(attentions)


class _Cache:
    """Caches that are read whole: how much of them counts is known on the device alone."""

    def slots(self, emit: Emitter) -> ir.Value:
        return _capacity(emit)

    def write_cache(self, emit: Emitter, past: ir.Value | None, heads: ir.Value, positions: ir.Value) -> ir.Value:
        column = emit("Unsqueeze", positions, vector(emit.graph, [1, 3]))
        places = emit("Expand", column, emit("Shape", heads))
        return emit("ScatterElements", past, places, heads, axis=2)

    def read(self, _: Emitter, present: ir.Value) -> ir.Value:
        return present


# ------------------------------------------------------------------------------------------------------------ logits


def gather_logit_rows(graph: ir.Graph, context: LoweringContext) -> int:
    """GatherND(hidden [B, S, N], indices [B, O]) -> Gather from rows [B * S, N], for the head.

    GatherND's CUDA kernel copies sizes from host memory that is gone when a recorded graph is repeated.
    """
    count = 0
    for node in nodes_of(graph, "GatherND"):
        emit = Emitter(node, main="Gather")
        flat = emit("Reshape", node.inputs[0], vector(graph, [-1, context.geometry.hidden_size]))
        lengths = _sequence_lengths(graph, Emitter(node, "positions"))
        firsts = emit("CumSum", lengths, scalar(graph, 0, np.int64), exclusive=1)
        column = emit("Unsqueeze", firsts, vector(graph, [1]))
        rows = emit("Add", graph_input(graph, "logit_indices"), column)
        replace(node, emit("Gather", flat, rows, axis=0))
        count += 1
    return count
