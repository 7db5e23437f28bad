"""Attention and norms in basic operators, for TensorRT 10.3 to 10.13, which has neither of them as operators.

The updated cache is a copy: a session keeps two of each and swaps them. The cache's capacity is the number of positions
that attention looks at, so a session that grows its cache in buckets pays for what sequences are long.
"""

import numpy as np
import onnx_ir as ir

from llmc.inventory import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import (
    LLMC,
    Emitter,
    constant,
    converted,
    graph_input,
    nodes_of,
    replace,
    scalar,
    vector,
)
from llmc.optimize.lower.rotary import rotary_tables
from llmc.optimize.lower.tensorrt.native import heads, merged
from llmc.optimize.lower.tensorrt.slots import Slots

# Softmax makes 0 of it in float32, and unlike -inf it can never turn into NaN.
MASKED = float(np.finfo(np.float32).min)


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> rotation, ScatterND into the cache, MatMul, Softmax in float32, MatMul."""
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if not attentions:
        return 0
    listed = [context.attention(node) for node in attentions]
    slots = Slots.before(attentions[0], "capacity", {_mask_of(attention) for attention in listed})
    first = Emitter(attentions[0], "positions")
    pairs = dict.fromkeys(tables for node in attentions if (tables := rotary_tables(node, context)))
    angles = {tables: [_per_head(first, table, slots.positions) for table in tables] for tables in pairs}
    indices = {n: _cache_indices(first, slots.positions, n) for n in sorted({item.kv_heads for item in listed})}
    for node, attention in zip(attentions, listed, strict=True):
        emit = Emitter(node)
        query, key, value = heads(emit, attention)
        if tables := rotary_tables(node, context):
            query, key = (_rotated(emit, x, *angles[tables]) for x in (query, key))
        presents = [
            emit("ScatterND", past, indices[attention.kv_heads], new)
            for past, new in zip(node.inputs[3:5], (key, value), strict=True)
        ]
        output = _attend(emit, query, presents, slots.masks[_mask_of(attention)], attention, context)
        replace(node, merged(emit, output), *presents)
    return len(attentions)


def _mask_of(attention: Attention) -> tuple[int, int]:
    """The window, and how many queries share a key head."""
    return attention.window, attention.heads // attention.kv_heads


def _per_head(emit: Emitter, table: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of a rotary table for the new tokens, [B, 1, S, D/2]."""
    return emit("Unsqueeze", emit("Gather", table, positions, axis=0), vector(emit.graph, [1]))


def _rotated(emit: Emitter, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotary positions of heads [B, heads, S, D], the first half of each paired with the second."""
    first, second = emit.many("Split", [x], 2, axis=-1, num_outputs=2)
    turned = emit("Sub", emit("Mul", first, cos), emit("Mul", second, sin))
    other = emit("Add", emit("Mul", second, cos), emit("Mul", first, sin))
    return emit("Concat", turned, other, axis=-1)


def _cache_indices(emit: Emitter, positions: ir.Value, kv_heads: int) -> ir.Value:
    """Places of new keys and values in the cache: row, head and position, int64 [B, KV, S, 3]."""
    graph = emit.graph
    ids = graph_input(graph, "input_ids")
    batch, sequence = (emit("Shape", ids, start=i, end=i + 1) for i in (0, 1))
    count = emit("Squeeze", batch, vector(graph, [0]))
    rows = emit("Range", scalar(graph, 0, np.int64), count, scalar(graph, 1, np.int64))
    numbers = np.arange(kv_heads, dtype=np.int64).reshape(1, -1, 1, 1)
    parts = (
        emit("Unsqueeze", rows, vector(graph, [1, 2, 3])),
        constant(graph, f"const.kv_heads.{kv_heads}", numbers),
        emit("Unsqueeze", positions, vector(graph, [1, 3])),
    )
    shape = emit("Concat", batch, vector(graph, [kv_heads]), sequence, vector(graph, [1]), axis=0)
    return emit("Concat", *(emit("Expand", part, shape) for part in parts), axis=-1)


def _attend(
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
    scale = emit.anchor.attributes["scale"].as_float()
    scaled = emit("Mul", query, scalar(graph, scale, context.array_type))
    stacked = emit("Reshape", scaled, vector(graph, [0, attention.kv_heads, -1, head_dim]))  # (B, KV, G*S, D)
    product = emit("MatMul", stacked, emit("Transpose", key, perm=[0, 1, 3, 2]))
    scores = converted(emit, product, context.type, ir.DataType.FLOAT)
    seen = emit("Where", mask, scores, scalar(graph, MASKED, np.float32))
    shares = converted(emit, emit("Softmax", seen, axis=-1), ir.DataType.FLOAT, context.type)
    return emit("Reshape", emit("MatMul", shares, value), vector(graph, [0, attention.heads, -1, head_dim]))


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """RMSNormalization -> its definition, in float32."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor, x = stored(norm.inputs[1]), norm.inputs[0]
        assert x is not None
        weight = constant(graph, f"{tensor.name}.float32", context.calibrated.rows(tensor))
        epsilon = scalar(graph, norm.attributes["epsilon"].as_float(), np.float32)
        emit = Emitter(norm)
        wide = converted(emit, x, context.type, ir.DataType.FLOAT)
        mean = emit("ReduceMean", emit("Mul", wide, wide), vector(graph, [-1]), keepdims=1)
        normed = emit("Div", wide, emit("Sqrt", emit("Add", mean, epsilon)))
        replace(norm, converted(emit, emit("Mul", normed, weight), ir.DataType.FLOAT, context.type))
        count += 1
    return count
