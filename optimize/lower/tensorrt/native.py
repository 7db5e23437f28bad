"""Attention and norms as TensorRT's own operators: the cache is updated in place.

TensorScatter becomes a KV-cache update, whose output shares the memory of its input. Attention reads the first
``attended`` positions of the updated cache, so that a step costs what the sequence is long, not what the cache holds.
"""

import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.exported import Weight
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import replace_weight
from llmc.optimize.lower.raising import find_vector, find_weight, head_scales, norm_nodes
from llmc.optimize.lower.rewrite import LLMC, Emitter, constant, emit_conversion, nodes_of, replace, scalar, vector
from llmc.optimize.lower.rotary import Pair, rotary_tables, rotations, table_pair
from llmc.optimize.lower.tensorrt.heads import attend, heads, merge_heads, split
from llmc.optimize.lower.tensorrt.slots import Slots
from llmc.optimize.lower.tensorrt.weights import narrow_values


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> RotaryEmbedding, TensorScatter and Attention under a mask that layers share."""
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if not attentions:
        return 0
    listed = [(node, context.attention(node)) for node in attentions]
    # By node the window, and how often the queries of a row follow each other.
    masks = {node: (it.window, it.group_size if _in_basic_operators(node) else 1) for node, it in listed}
    turned = rotations(graph, context)
    slots = Slots.before(turned[0][0] if turned else attentions[0], set(masks.values()))
    for node, attention in turned:
        emit = Emitter(node, main="RotaryEmbedding")
        x = split(emit, node.inputs[0], node.attributes["num_heads"].as_int())
        replace(node, merge_heads(emit, _rotate(emit, attention, x, table_pair(node, context), slots)))
    attended = Emitter(attentions[0], "attended")("Shape", slots.cache_slots)
    for node, attention in listed:
        emit = Emitter(node, main="Attention")
        query, key, value = heads(emit, attention)
        if tables := rotary_tables(node, context):
            query = _rotate(emit, attention, query, tables.query, slots)
            key = _rotate(emit, attention, key, tables.key, slots)
        presents = [
            emit("TensorScatter", past, new, slots.past_lengths, axis=2)
            for past, new in zip(node.inputs[3:5], (key, value), strict=True)
        ]
        seen = [emit("Slice", present, vector(graph, [0]), attended, vector(graph, [2])) for present in presents]
        mask = slots.masks[masks[node]]
        if _in_basic_operators(node):
            output = attend(emit, query, seen, mask, attention, context)
        else:
            # A scale of the operator is multiplied into the query and into all the keys, at every step; that of 1 which
            # stays is taken out of the parsed network, see :meth:`llmc.optimize.tensorrt.network.Network.refine`.
            scale = scalar(graph, node.attributes["scale"].as_float(), context.array_type)
            output = emit("Attention", emit("Mul", query, scale), *seen, mask, scale=1.0)
        replace(node, merge_heads(emit, output), *presents)
    return len(attentions)


def widen_attention(graph: ir.Graph, kind: ir.DataType) -> int:
    """Give every Attention of a lowered graph of this type its query, keys and values in float32; the mask is bool."""
    attentions = list(nodes_of(graph, "Attention"))
    for node in attentions:
        emit = Emitter(node, f"{node.name}.float32", main="Attention")
        wide = [emit_conversion(emit, value, kind, ir.DataType.FLOAT) for value in node.inputs[:3] if value is not None]
        output = emit("Attention", *wide, node.inputs[3], scale=1.0)
        replace(node, emit_conversion(emit, output, ir.DataType.FLOAT, kind))
    return len(attentions)


def _rotate(emit: Emitter, attention: Attention, x: ir.Value, tables: Pair, slots: Slots) -> ir.Value:
    interleaved, dim = emit.anchor.attributes["interleaved"].as_int(), attention.rotary_dim
    return emit("RotaryEmbedding", x, *tables, slots.positions, interleaved=interleaved, rotary_embedding_dim=dim)


def _in_basic_operators(node: ir.Node) -> bool:
    """Parsers refuse a softcap of Attention (TensorRT-RTX 1.7.1)."""
    return bool(node.attributes["softcap"].as_float())


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """Give each norm its weight and bias in the compute type; it sums in float32."""
    norms = norm_nodes(graph)
    for scale in head_scales(graph):
        replace_weight(scale, _narrow(graph, find_vector(scale), context))
    for norm in norms:
        for index, value in enumerate(norm.inputs[1:], 1):
            norm.replace_input_with(index, _narrow(graph, find_weight(value), context))
    return len(norms)


def _narrow(graph: ir.Graph, tensor: Weight, context: LoweringContext) -> ir.Value:
    values = narrow_values(context.calibrated.rows(tensor), context.compute, tensor.name or "")
    return constant(graph, f"{tensor.name}.{context.compute}", values)
