"""Attention and norms as operators of TensorRT from 10.15 on, and of TensorRT-RTX: the cache is updated in place.

TensorScatter becomes a KV-cache update, whose output shares the memory of its input. Attention reads the first
``attended`` positions of the updated cache, so that a step costs what the sequence is long, not what the cache holds.
"""

import onnx_ir as ir

from llmc.inventory import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import LLMC, Emitter, constant, nodes_of, replace, vector
from llmc.optimize.lower.rotary import rotary_tables
from llmc.optimize.lower.tensorrt.slots import Slots
from llmc.optimize.lower.tensorrt.weights import narrowed


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> RotaryEmbedding, TensorScatter and Attention under a mask that layers share."""
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if not attentions:
        return 0
    windows = {(context.attention(node).window, 1) for node in attentions}
    slots = Slots.before(attentions[0], "attended", windows)
    attended = Emitter(attentions[0], "attended")("Shape", slots.cache_slots)
    for node in attentions:
        emit, attention = Emitter(node, main="Attention"), context.attention(node)
        query, key, value = heads(emit, attention)
        if tables := rotary_tables(node, context):
            query, key = (emit("RotaryEmbedding", x, *tables, slots.positions) for x in (query, key))
        presents = [
            emit("TensorScatter", past, new, slots.past_lengths, axis=2)
            for past, new in zip(node.inputs[3:5], (key, value), strict=True)
        ]
        seen = [emit("Slice", present, vector(graph, [0]), attended, vector(graph, [2])) for present in presents]
        mask = slots.masks[attention.window, 1]
        output = emit("Attention", query, *seen, mask, scale=node.attributes["scale"].as_float())
        replace(node, merged(emit, output), *presents)
    return len(attentions)


def heads(emit: Emitter, attention: Attention) -> list[ir.Value]:
    """Query, key and value of the attention before which ``emit`` emits, [B, heads, S, D]."""
    counts = (attention.heads, attention.kv_heads, attention.kv_heads)
    return [_split(emit, value, count) for value, count in zip(emit.anchor.inputs[:3], counts, strict=True)]


def _split(emit: Emitter, value: ir.Value | None, count: int) -> ir.Value:
    """[B, S, heads * D] -> [B, heads, S, D]; the norm of each head has split them already."""
    assert value is not None
    producer = value.producer()
    if producer is not None and producer.op_type == "Reshape" and _is_norm(producer.inputs[0]):
        split = producer.inputs[0]
    else:
        split = emit("Reshape", value, vector(emit.graph, [0, 0, count, -1]))
    return emit("Transpose", split, perm=[0, 2, 1, 3])


def _is_norm(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "RMSNormalization"


def merged(emit: Emitter, output: ir.Value) -> ir.Value:
    """[B, heads, S, D] -> [B, S, heads * D]."""
    turned = emit("Transpose", output, perm=[0, 2, 1, 3])
    return emit("Reshape", turned, vector(emit.graph, [0, 0, -1]))


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """Give each RMSNormalization its weight in the compute type; it sums in float32."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor = stored(norm.inputs[1])
        weight = narrowed(context.calibrated.rows(tensor), context.compute, tensor.name or "")
        norm.replace_input_with(1, constant(graph, f"{tensor.name}.{context.compute}", weight))
        count += 1
    return count
