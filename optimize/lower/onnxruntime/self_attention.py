"""Attention within a call, for encoders: causal attention becomes GroupQueryAttention without a past, bidirectional
attention MultiHeadAttention, or basic operators where it has windows, a bias or groups of heads."""

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import (
    emit_attention,
    emit_rotation,
    emit_token_counts,
    group_query_attention,
    rotate_before,
    token_positions,
)
from llmc.optimize.lower.onnxruntime.folded_heads import Branch, choose
from llmc.optimize.lower.rewrite import LLMC, MICROSOFT, Emitter, graph_input, nodes_of, replace, scalar, vector
from llmc.optimize.lower.rotary import rotary_tables

CAUSAL, MHA = "causal", "MultiHeadAttention"
PLAIN_INPUTS = 7  # of llmc::CachedAttention; one more is a bias [1, H, S, S]


def as_cached(graph: ir.Graph, _: LoweringContext) -> int:
    """llmc::SelfAttention -> llmc::CachedAttention with nothing for its past, so that later passes see one operator."""
    count = 0
    for node in nodes_of(graph, "SelfAttention", LLMC):
        if not count:  # positions begin with the call, and with nothing that was before
            graph.meta["positions"] = Emitter(graph[0], "positions")(
                "Sub", emit_token_counts(graph), scalar(graph, 1, np.int64)
            )
        query, key, value, lengths, *others = node.inputs
        inputs = [query, key, value, None, None, lengths, *others]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        emit = Emitter(node, main="CachedAttention")
        replace(node, emit.many("CachedAttention", inputs, 3, LLMC, **attributes)[0])
        count += 1
    return count


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """The same operator -> attention over the tokens of the call."""
    rotate_before(graph, context)
    count, masks, rows = 0, dict[int, ir.Value](), list[ir.Value]()
    for node in nodes_of(graph, "CachedAttention", LLMC):
        if not node.attributes[CAUSAL].as_int():
            _attend(node, context, masks, rows)
            count += 1
    return count + group_query_attention(graph, context, _lengths)


def _lengths(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    """Lengths of causal attention: every row as long as the call, since only padding sees padding."""
    emit, ids = Emitter(first, "positions"), graph_input(graph, "input_ids")
    batch, sequence = emit("Shape", ids, start=0, end=1), emit("Shape", ids, start=1, end=2)
    total = emit("Cast", sequence, to=ir.DataType.INT32)
    return [emit("Expand", emit("Sub", total, scalar(graph, 1, np.int32)), batch), total]


def _attend(node: ir.Node, context: LoweringContext, masks: dict[int, ir.Value], rows: list[ir.Value]) -> None:
    """Replace an attention whose positions see those after them; ``masks`` and ``rows`` are made by the first one."""
    emit, attention = Emitter(node), context.attention(node)
    query, key, value = node.inputs[:3]
    if tables := rotary_tables(node, context):
        query, key = emit_rotation(emit, attention, (query, key), token_positions(emit.graph, node), tables)
    bias = emit("Unsqueeze", node.inputs[-2], vector(emit.graph, [2])) if len(node.inputs) > PLAIN_INPUTS else None
    grouped, softcap = attention.heads != attention.kv_heads, node.attributes["softcap"].as_float()
    if attention.window or bias is not None or grouped or softcap:
        split = vector(emit.graph, [0, 0, attention.kv_heads, 1, attention.head_dim])
        keys, values = (
            emit("Transpose", emit("Reshape", part, split), perm=[0, 2, 3, 1, 4]) for part in (key, value)
        )  # (B, KV, 1, S, D)
        if attention.window not in masks:
            masks[attention.window] = _mask(emit, attention.window)
        attended = emit_attention(emit, attention, query, keys, values, masks[attention.window], bias)
    else:
        rows[:] = rows or _rows(emit)
        attended = _emit_whole(emit, attention, [query, key, value], *rows)
    replace(node, attended, *emit.many("Split", [attended], 2, num_outputs=2, axis=-1))


def _rows(emit: Emitter) -> list[ir.Value]:
    """Tokens of each row, int32 [B], and whether all rows are as long as the call."""
    graph, lengths = emit.graph, graph_input(emit.graph, "lengths")
    sequence = emit("Squeeze", emit("Shape", graph_input(graph, "input_ids"), start=1, end=2))
    shortest = emit("ReduceMin", lengths, keepdims=0)
    return [emit("Cast", lengths, to=ir.DataType.INT32), emit("Equal", shortest, sequence)]


def _emit_whole(
    emit: Emitter, attention: Attention, inputs: list[ir.Value | None], lengths: ir.Value, full: ir.Value
) -> ir.Value:
    """MultiHeadAttention over all tokens of each row. Without padding the kernel never holds all scores, which takes
    half the time (32 rows of 128 tokens, onnxruntime 1.32)."""
    given = {"num_heads": attention.heads, "scale": emit.anchor.attributes["scale"].as_float()}
    padded = emit(MHA, *inputs, None, lengths, domain=MICROSOFT, **given)
    node = padded.producer()
    assert node is not None
    branch = Branch(node, "full")
    whole = branch(MHA, *inputs, domain=MICROSOFT, **given)
    return choose(node, full, branch, [whole], "padded")[0]


def _mask(emit: Emitter, window: int) -> ir.Value:
    """Positions that a position sees, bool [B, 1, 1, S, S]: those of its row less than ``window`` away, and itself."""
    graph, counted = emit.graph, emit_token_counts(emit.graph)
    column, row = (emit("Unsqueeze", counted, vector(graph, added)) for added in ([1, 2, 4], [1, 2, 3]))
    ends = emit("Unsqueeze", graph_input(graph, "lengths"), vector(graph, [1, 2, 3, 4]))
    mask, distance = emit("LessOrEqual", row, ends), emit("Abs", emit("Sub", column, row))
    if window:
        mask = emit("And", mask, emit("Less", distance, scalar(graph, window, np.int64)))
    return emit("Or", mask, emit("Equal", distance, scalar(graph, 0, np.int64)))
