"""Heads of an attention, split, attending and merged, in basic operators that every TensorRT has."""

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import NORMS
from llmc.optimize.lower.rewrite import Emitter, emit_conversion, scalar, vector

# Softmax makes 0 of it in float32, and unlike -inf it can never turn into NaN.
MASKED = float(np.finfo(np.float32).min)


def heads(emit: Emitter, attention: Attention) -> list[ir.Value]:
    """Query, key and value of the attention before which ``emit`` emits, [B, heads, S, D]."""
    counts = (attention.heads, attention.kv_heads, attention.kv_heads)
    return [split(emit, value, count) for value, count in zip(emit.anchor.inputs[:3], counts, strict=True)]


def split(emit: Emitter, value: ir.Value | None, count: int) -> ir.Value:
    """[B, S, heads * D] -> [B, heads, S, D]; the norm of each head has split them already."""
    assert value is not None
    producer = value.producer()
    parts = producer.inputs[0] if producer is not None and producer.op_type == "Reshape" else None
    norm = parts.producer() if parts is not None else None
    if norm is None or norm.op_type not in NORMS:
        parts = emit("Reshape", value, vector(emit.graph, [0, 0, count, -1]))
    return emit("Transpose", parts, perm=[0, 2, 1, 3])


def merge_heads(emit: Emitter, output: ir.Value) -> ir.Value:
    """[B, heads, S, D] -> [B, S, heads * D]."""
    turned = emit("Transpose", output, perm=[0, 2, 1, 3])
    return emit("Reshape", turned, vector(emit.graph, [0, 0, -1]))


def attend(
    emit: Emitter,
    query: ir.Value,
    presents: list[ir.Value],
    mask: ir.Value,
    attention: Attention,
    context: LoweringContext,
) -> ir.Value:
    """Attention [B, heads, S, D] of queries [B, heads, S, D] over a cache [B, KV, C, D], under a mask [B, 1, G * S, C].

    The G queries that share a key head are stacked along the sequence, so keys and values are read as they lie.
    """
    graph, head_dim = emit.graph, attention.head_dim
    key, value = presents
    # Before the product, which float16 could not hold otherwise.
    scale, softcap = (emit.anchor.attributes[name].as_float() for name in ("scale", "softcap"))
    scaled = emit("Mul", query, scalar(graph, scale / (softcap or 1.0), context.array_type))
    stacked = emit("Reshape", scaled, vector(graph, [0, attention.kv_heads, -1, head_dim]))  # (B, KV, G*S, D)
    product = emit("MatMul", stacked, emit("Transpose", key, perm=[0, 1, 3, 2]))
    scores = emit_conversion(emit, product, context.type, ir.DataType.FLOAT)
    if softcap:
        scores = emit("Mul", emit("Tanh", scores), scalar(graph, softcap, np.float32))
    seen = emit("Where", mask, scores, scalar(graph, MASKED, np.float32))
    shares = emit_conversion(emit, emit("Softmax", seen, axis=-1), ir.DataType.FLOAT, context.type)
    return emit("Reshape", emit("MatMul", shares, value), vector(graph, [0, attention.heads, -1, head_dim]))
