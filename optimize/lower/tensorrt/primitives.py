"""Attention and norms in basic operators, for TensorRT 10.3 to 10.13, which has neither of them as operators.

The updated cache is a copy: a session keeps two of each and swaps them. The cache's capacity is the number of positions
that attention looks at, so a session that grows its cache in buckets pays for what sequences are long.
"""

import numpy as np
import onnx_ir as ir

from llmc.inventory import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import norm_nodes, stored
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
from llmc.optimize.lower.rotary import rotary_tables, rotations, table_pair
from llmc.optimize.lower.tensorrt.heads import attend, heads, mask_of, merged, split
from llmc.optimize.lower.tensorrt.slots import Slots


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> rotation, ScatterND into the cache, MatMul, Softmax in float32, MatMul."""
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if not attentions:
        return 0
    listed = [context.attention(node) for node in attentions]
    turned = rotations(graph, context)
    begin = turned[0][0] if turned else attentions[0]
    slots, first = Slots.before(begin, "capacity", {mask_of(it) for it in listed}), Emitter(begin, "positions")
    made = [tables for node in attentions if (tables := rotary_tables(node, context))]
    pairs = dict.fromkeys(pair for tables in made for pair in (tables.query, tables.key))
    pairs |= dict.fromkeys(table_pair(node, context) for node, _ in turned)
    angles = {pair: [_per_head(first, table, slots.positions) for table in pair] for pair in pairs}
    indices = {n: _cache_indices(first, slots.positions, n) for n in sorted({item.kv_heads for item in listed})}
    for node, attention in turned:
        emit = Emitter(node)
        x = split(emit, node.inputs[0], node.attributes["num_heads"].as_int())
        replace(node, merged(emit, _rotated(emit, attention, x, *angles[table_pair(node, context)])))
    for node, attention in zip(attentions, listed, strict=True):
        emit = Emitter(node)
        query, key, value = heads(emit, attention)
        if tables := rotary_tables(node, context):
            query, key = (
                _rotated(emit, attention, x, *angles[pair]) for x, pair in ((query, tables.query), (key, tables.key))
            )
        presents = [
            emit("ScatterND", past, indices[attention.kv_heads], new)
            for past, new in zip(node.inputs[3:5], (key, value), strict=True)
        ]
        output = attend(emit, query, presents, slots.masks[mask_of(attention)], attention, context)
        replace(node, merged(emit, output), *presents)
    return len(attentions)


def _per_head(emit: Emitter, table: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of a rotary table for the new tokens, [B, 1, S, R/2]."""
    return emit("Unsqueeze", emit("Gather", table, positions, axis=0), vector(emit.graph, [1]))


def _rotated(emit: Emitter, attention: Attention, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotary positions of heads [B, heads, S, D], of whose first R values each one of a pair is turned to the other."""
    graph, dim, rest = emit.graph, attention.rotary_dim, []
    if dim != attention.head_dim:
        sizes = vector(graph, [dim, attention.head_dim - dim])
        x, *rest = emit.many("Split", [x, sizes], 2, axis=-1)
    interleaved = bool(emit.anchor.attributes["interleaved"].as_int())
    if interleaved:  # pairs [B, heads, S, R/2, 2] -> halves
        pairs = emit("Reshape", x, vector(graph, [0, 0, 0, -1, 2]))
        first, second = (emit("Gather", pairs, scalar(graph, place, np.int64), axis=-1) for place in (0, 1))
    else:
        first, second = emit.many("Split", [x], 2, axis=-1, num_outputs=2)
    turned = emit("Sub", emit("Mul", first, cos), emit("Mul", second, sin))
    other = emit("Add", emit("Mul", second, cos), emit("Mul", first, sin))
    if interleaved:
        columns = (emit("Unsqueeze", part, vector(graph, [-1])) for part in (turned, other))
        made = [emit("Reshape", emit("Concat", *columns, axis=-1), vector(graph, [0, 0, 0, -1]))]
    else:
        made = [turned, other]
    return emit("Concat", *made, *rest, axis=-1) if len(made + rest) > 1 else made[0]


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


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """RMSNormalization and LayerNormalization -> their definitions, in float32."""
    norms = norm_nodes(graph)
    for norm in norms:
        emit, axis, x = Emitter(norm), vector(graph, [-1]), norm.inputs[0]
        assert x is not None
        weight, *bias = (
            constant(graph, f"{tensor.name}.float32", context.calibrated.rows(tensor))
            for tensor in map(stored, norm.inputs[1:])
        )
        epsilon = scalar(graph, norm.attributes["epsilon"].as_float(), np.float32)
        wide = converted(emit, x, context.type, ir.DataType.FLOAT)
        if norm.op_type == "LayerNormalization":
            wide = emit("Sub", wide, emit("ReduceMean", wide, axis, keepdims=1))
        square = emit("ReduceMean", emit("Mul", wide, wide), axis, keepdims=1)
        normed = emit("Mul", emit("Div", wide, emit("Sqrt", emit("Add", square, epsilon))), weight)
        shifted = emit("Add", normed, *bias) if bias else normed
        replace(norm, converted(emit, shifted, ir.DataType.FLOAT, context.type))
    return len(norms)
