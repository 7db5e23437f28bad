"""Attention, and which rows get logits, for ONNX Runtime on GPUs: the host computes nothing from what is on the device.

A CUDA graph repeats recorded kernels; copies between host and device within a graph are slow, and ONNX Runtime refuses
to record them. So what follows from lengths is computed on the device, without Shape, and what attention's host code
must know is taken from the cache's shape.

Facts about ONNX Runtime come from its documentation (docs/OperatorKernels.md) and the source of its CUDA kernels. Not
run on a GPU yet.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import (
    attended,
    counted_tokens,
    group_query_attention,
    rotate_before,
    rotated,
    token_positions,
)
from llmc.optimize.lower.rewrite import LLMC, Emitter, graph_input, nodes_of, replace, scalar, vector
from llmc.optimize.lower.rotary import rotary_tables


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> GroupQueryAttention over shared buffers, or basic operators where it has no kernel."""
    if context.compute == "float16":
        return group_query_attention(graph, context, _lengths)
    if context.compute == "float32":  # the CUDA provider has GroupQueryAttention for 16 bits only
        return _basic_attention(graph, context)
    raise BuildError(f"the cuda target computes in float16 or float32, not in {context.compute}; change compute")


def _sequence_lengths(graph: ir.Graph, emit: Emitter) -> ir.Value:
    """S for each row, int64 [B], on the device."""
    return emit("Gather", counted_tokens(graph), scalar(graph, -1, np.int64), axis=1)


def _lengths(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    """``seqlens_k`` int32 [B] on the device, and ``total_sequence_length`` int32 [1] on the host.

    The latter is the cache's capacity, an upper bound that sizes grids and buffers: lengths come from ``seqlens_k``.
    """
    emit = Emitter(first, "positions")
    totals = emit("Add", graph_input(graph, "past_lengths"), _sequence_lengths(graph, emit))
    last = emit("Sub", totals, scalar(graph, 1, np.int64))
    return [emit("Cast", value, to=ir.DataType.INT32) for value in (last, _capacity(emit))]


def _capacity(emit: Emitter) -> ir.Value:
    """The cache's capacity, int64 [1], from that of the attention before which ``emit`` emits."""
    return emit("Shape", emit.anchor.inputs[3], start=2, end=3)


# -------------------------------------------------------------------------------------------------- basic operators


@dataclass
class _Shared:
    """Values that all layers use: positions int64 [B, S], columns [B, 1, 1, S, 1], cache slots [C], masks by window."""

    positions: ir.Value
    columns: ir.Value
    slots: ir.Value
    masks: dict[int, ir.Value]


def _basic_attention(graph: ir.Graph, context: LoweringContext) -> int:
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if attentions:
        rotate_before(graph, context)
        shared = _shared(graph, attentions[0])
        for node in attentions:
            replace(node, *_attend(node, shared, context))
    return len(attentions)


def _shared(graph: ir.Graph, first: ir.Node) -> _Shared:
    positions = token_positions(graph, first)
    emit = Emitter(first, "positions")
    zero, one = (scalar(graph, value, np.int64) for value in (0, 1))
    slots = emit("Range", zero, emit("Squeeze", _capacity(emit)), one)
    return _Shared(positions, emit("Unsqueeze", positions, vector(graph, [1, 2, 4])), slots, {})


def _attend(node: ir.Node, shared: _Shared, context: LoweringContext) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Attention [B, S, H * D] and the cache [B, KV, C, D] with the new keys and values in it."""
    query, key, value, past_key, past_value = node.inputs[:5]
    emit, attention = Emitter(node), context.attention(node)
    graph, kv_heads, head_dim = emit.graph, attention.kv_heads, attention.head_dim
    if tables := rotary_tables(node, context):
        query, key = rotated(emit, attention, shared.positions, tables)
    present_key, present_value = (
        _written(emit, past, part, shared, (kv_heads, head_dim))
        for past, part in ((past_key, key), (past_value, value))
    )
    keys, values = (
        emit("Unsqueeze", present, vector(graph, [2])) for present in (present_key, present_value)
    )  # (B, KV, 1, C, D)
    mask = _mask(emit, shared, attention.window)
    return attended(emit, attention, query, keys, values, mask), present_key, present_value


def _written(
    emit: Emitter, past: ir.Value | None, part: ir.Value | None, shared: _Shared, heads: tuple[int, int]
) -> ir.Value:
    """The cache with new keys or values [B, S, KV * D] in it, in place where past and present share their memory."""
    split = emit("Reshape", part, vector(emit.graph, [0, 0, *heads]))
    turned = emit("Transpose", split, perm=[0, 2, 1, 3])  # (B, KV, S, D)
    column = emit("Unsqueeze", shared.positions, vector(emit.graph, [1, 3]))
    places = emit("Expand", column, emit("Shape", turned))
    return emit("ScatterElements", past, places, turned, axis=2)


def _mask(emit: Emitter, shared: _Shared, window: int) -> ir.Value:
    """Cache slots that a position sees, bool [B, 1, 1, S, C]: all up to its own, or the last ``window`` of those."""
    if window not in shared.masks:
        mask = emit("LessOrEqual", shared.slots, shared.columns)
        if window:
            oldest = emit("Sub", shared.columns, scalar(emit.graph, window, np.int64))
            mask = emit("And", mask, emit("Greater", shared.slots, oldest))
        shared.masks[window] = mask
    return shared.masks[window]


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
