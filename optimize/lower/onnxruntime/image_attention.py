"""Attention within images in both directions: an image token also sees the image tokens after it.

GroupQueryAttention lets no token see a later one. Where a call has rows of images, it writes the cache all the same,
and basic operators attend once more over what it wrote; a call without images goes on as if there were none.
"""

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import AHEAD, GQA, LOOKING, emit_attention, token_positions
from llmc.optimize.lower.onnxruntime.folded_heads import Branch, choose
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, emit_conversion, nodes_of, scalar, vector

# Inputs of GroupQueryAttention.
TOTAL, COSINE, SINE, KEY_SCALE, VALUE_SCALE = 6, 7, 8, 12, 13


def attend_both_ways(graph: ir.Graph, context: LoweringContext) -> int:
    """GroupQueryAttention -> If(some token sees ahead, the same and basic operators, as it was)."""
    if AHEAD not in graph.meta:
        return 0
    nodes = [node for node in nodes_of(graph, GQA, MICROSOFT) if node.name in graph.meta.get(LOOKING, ())]
    if not nodes:
        return 0
    seen = _Seen(nodes[0], graph.meta[AHEAD], context.attention_type)
    for node in nodes:
        emit = Branch(node, "both_ways")
        choose(node, seen.any, emit, _attend(emit, context.geometry.attention[node.name or ""], seen), "causal")
    return len(nodes)


class _Seen:
    """Values that all layers share, made in front of the first.

    Attributes:
        type: of what attention reads and gives, where float32 is computed in between.
        any: true if a token sees ahead.
        positions: of the new tokens, int64 [B, S].
        own, last: their positions, and the last that each sees, int64 [B, 1, 1, S, 1].
        total: positions with the new ones, int64 [1].
        slots: all of these, int64 [T].
    """

    def __init__(self, first: ir.Node, ahead: ir.Value, kind: ir.DataType) -> None:
        graph = ahead.graph
        assert graph is not None
        self.type = kind
        self.positions = token_positions(graph, first)
        emit = Emitter(first, "images")
        zero, one = (scalar(graph, number, np.int64) for number in (0, 1))
        self.any = emit("Greater", emit("ReduceMax", ahead, keepdims=0), zero)
        last, column = emit("Add", self.positions, ahead), vector(graph, [1, 2, 4])
        self.own, self.last = (emit("Unsqueeze", value, column) for value in (self.positions, last))
        total = emit("Cast", first.inputs[TOTAL], to=ir.DataType.INT64)
        self.total = emit("Reshape", total, vector(graph, [1]))
        self.slots = emit("Range", zero, total, one)


def _attend(emit: Branch, attention: Attention, seen: _Seen) -> list[ir.Value]:
    """Outputs of the attention before which ``emit`` emits; ``seen`` says how far ahead each token sees."""
    graph, node = emit.graph, emit.anchor
    _, *presents = emit.many(GQA, list(node.inputs), 3, MICROSOFT, **dict(node.attributes))
    query = node.inputs[0]
    assert query is not None
    if node.inputs[1] is None:
        width = vector(graph, [attention.heads * attention.head_dim])
        query = emit("Slice", query, vector(graph, [0]), width, vector(graph, [2]))
    if node.attributes["do_rotary"].as_int():
        query = emit(
            "RotaryEmbedding",
            *(query, seen.positions, node.inputs[COSINE], node.inputs[SINE]),
            domain=MICROSOFT,
            num_heads=attention.heads,
            rotary_embedding_dim=attention.rotary_dim,
            interleaved=node.attributes["rotary_interleaved"].as_int(),
        )
    query = emit_conversion(emit, query, seen.type, ir.DataType.FLOAT)
    keys, values = (
        emit("Unsqueeze", _read(emit, attention, present, index, seen), vector(graph, [2]))
        for present, index in zip(presents, (KEY_SCALE, VALUE_SCALE), strict=True)
    )  # (B, KV, 1, T, D)
    mask = emit("LessOrEqual", seen.slots, seen.last)
    if attention.window:
        oldest = emit("Sub", seen.own, scalar(graph, attention.window, np.int64))
        mask = emit("And", mask, emit("Greater", seen.slots, oldest))
    attended = emit_attention(emit, attention, query, keys, values, mask)
    return [emit_conversion(emit, attended, ir.DataType.FLOAT, seen.type), *presents]


def _read(emit: Branch, attention: Attention, present: ir.Value, index: int, seen: _Seen) -> ir.Value:
    """Keys or values of all positions, float32 [B, KV, T, D]; ``index`` is that of the scales of one in integers."""
    graph, inputs = emit.graph, emit.anchor.inputs
    held = emit("Slice", present, vector(graph, [0]), seen.total, vector(graph, [2]))
    scales = inputs[index] if index < len(inputs) else None
    if scales is None:
        return emit_conversion(emit, held, seen.type, ir.DataType.FLOAT)
    by_channel = emit.anchor.attributes["k_quant_type"].as_string() == "PER_CHANNEL"
    shape = [1, attention.kv_heads, 1, attention.head_dim] if by_channel else [1]
    return emit("Mul", emit("Cast", held, to=ir.DataType.FLOAT), emit("Reshape", scales, vector(graph, shape)))
