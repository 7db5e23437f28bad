"""Attention for ONNX Runtime on CPUs."""

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.kinds import takes_whole_texts
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import QUANTIZED_CACHES, group_query_attention, rotate_before
from llmc.optimize.lower.onnxruntime.basic_attention import Shared, basic_attention, shared_attention
from llmc.optimize.lower.onnxruntime.hidden import LAST_ROWS
from llmc.optimize.lower.rewrite import (
    LLMC,
    Emitter,
    constant,
    emit_conversion,
    graph_input,
    nodes_of,
    replace,
    scalar,
    vector,
)

# Positions that ONNX Runtime's softmax adds up side by side, in vectors of all widths.
SUMMED_AT_ONCE = 64


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> GroupQueryAttention over the shared buffers of a CPU, or basic operators."""
    rotate_before(graph, context)
    shared = _lower_shared(graph, context)
    return shared + _lower_basic(graph, context) + group_query_attention(graph, context, _lengths)


def _lower_shared(graph: ir.Graph, context: LoweringContext) -> int:
    """Attentions over caches of other layers in basic operators: queries are few, and have positions of their own."""
    nodes = list(nodes_of(graph, "SharedAttention", LLMC))
    if nodes:
        _ask_for_a_row(graph)
        shared = Shared.before(nodes[0], _Cache(nodes[0], context), nodes[0].inputs[3])
        for node in nodes:
            replace(node, shared_attention(node, shared, context))
    return len(nodes)


def _ask_for_a_row(graph: ir.Graph) -> None:
    """Compute a row even if no logits are wanted, and drop it before the last norm: kernels cannot quantize 0 rows."""
    indices, emit = graph_input(graph, "logit_indices"), Emitter(graph[0], "logit_rows")
    readers = list(indices.uses())
    count = emit("Shape", indices, start=1, end=2)
    missing = emit("Max", emit("Sub", vector(graph, [1]), count), vector(graph, [0]))
    asked = emit("Pad", indices, emit("Concat", vector(graph, [0, 0, 0]), missing, axis=0))
    graph.meta["asked"] = asked
    for node, index in readers:
        node.replace_input_with(index, asked)
    last = next(node for node in graph if node.name == "model.norm")
    rows = Emitter(last, "logit_rows")("Slice", last.inputs[0], vector(graph, [0]), count, vector(graph, [1]))
    last.replace_input_with(0, rows)
    graph.meta[LAST_ROWS] = rows


def _lengths(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    emit = Emitter(first, "positions")
    totals = emit("Cast", _totals(emit), to=ir.DataType.INT32)
    longest = emit("ReduceMax", totals, keepdims=0)
    return [emit("Sub", totals, scalar(graph, 1, np.int32)), longest]


def _totals(emit: Emitter) -> ir.Value:
    """Positions of each row including the new ones, or ``seen_lengths``, int64 [B]."""
    if (seen := next((value for value in emit.graph.inputs if value.name == "seen_lengths"), None)) is not None:
        return seen
    sequence = emit("Shape", graph_input(emit.graph, "input_ids"), start=1, end=2)
    return emit("Add", graph_input(emit.graph, "past_lengths"), sequence)


# ---------------------------------------------------------------------------------------------------- basic operators


def _lower_basic(graph: ir.Graph, context: LoweringContext) -> int:
    """Attentions that see later tokens in basic operators, and those with a softcap where many tokens come at once.

    GroupQueryAttention lets no token see a later one, and computes tanh one by one, 11 ns each: 128 tokens attend in
    three times, 256 after 1,792 in four times the time of these operators (onnxruntime 1.32). A single token is not
    worth the copies.
    """
    nodes = list(nodes_of(graph, "CachedAttention", LLMC))
    if not takes_whole_texts(context.geometry):
        capped = context.phase == "prefill" and context.cache not in QUANTIZED_CACHES
        nodes = [node for node in nodes if capped and node.attributes["softcap"].as_float()]
    if not nodes:
        return 0
    shared = Shared.before(nodes[0], _Cache(nodes[0], context))
    for node in nodes:
        replace(node, *basic_attention(node, shared, context))
    return len(nodes)


class _Cache:
    """Read caches in whole tiles, as many as the longest row fills, so that a row's sums round the same whatever rows
    are beside it."""

    def __init__(self, first: ir.Node, context: LoweringContext) -> None:
        self._types = context.type, context.attention_type
        emit = Emitter(first, "positions")
        longest, unit = emit("ReduceMax", _totals(emit), keepdims=1), vector(emit.graph, [SUMMED_AT_ONCE])
        units = emit("Div", emit("Add", longest, vector(emit.graph, [SUMMED_AT_ONCE - 1])), unit)
        keys = next(value for value in emit.graph.inputs if str(value.name).startswith("past_key_values."))
        self._longest = emit("Min", emit("Mul", units, unit), emit("Shape", keys, start=2, end=3))
        self._places: dict[int, ir.Value] = {}  # those made so far, by heads of keys

    def slots(self, _: Emitter) -> ir.Value:
        return self._longest

    def write_cache(self, emit: Emitter, past: ir.Value | None, heads: ir.Value, positions: ir.Value) -> ir.Value:
        kv_heads = emit.anchor.attributes["kv_heads"].as_int()
        if kv_heads not in self._places:
            self._places[kv_heads] = _places(Emitter(emit.anchor, "positions"), positions, kv_heads)
        return emit("ScatterND", past, self._places[kv_heads], emit_conversion(emit, heads, *self._types))

    def read(self, emit: Emitter, present: ir.Value) -> ir.Value:
        filled = emit("Slice", present, vector(emit.graph, [0]), self._longest, vector(emit.graph, [2]))
        return emit_conversion(emit, filled, *self._types[::-1])


def _places(emit: Emitter, positions: ir.Value, kv_heads: int) -> ir.Value:
    """The place of each new key in a cache [B, KV, C, D], int64 [B, KV, S, 3], from positions [B, S]."""
    graph, numbers = emit.graph, np.arange(kv_heads).reshape(1, kv_heads, 1, 1)
    column = emit("Unsqueeze", positions, vector(graph, [1, 3]))  # (B, 1, S, 1)
    nothing = emit("Mul", column, scalar(graph, 0, np.int64))
    ones = emit("Add", nothing, scalar(graph, 1, np.int64))
    rows = emit("CumSum", ones, scalar(graph, 0, np.int64), exclusive=1)
    heads = emit("Add", nothing, constant(graph, f"const.heads.column.{kv_heads}", numbers))  # (B, KV, S, 1)
    everywhere = emit("Shape", heads)
    return emit("Concat", emit("Expand", rows, everywhere), heads, emit("Expand", column, everywhere), axis=-1)
