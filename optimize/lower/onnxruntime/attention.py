"""Attention for ONNX Runtime on CPUs: packed projections into GroupQueryAttention over shared buffers."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    constant,
    initializer,
    nodes_of,
    replace,
    vector,
)
from llmc.optimize.quantize import kv_cache

QUANTIZED_CACHES = {"int8": "PER_TENSOR", "int8-channel": "PER_CHANNEL"}
# What the cache's values are declared as, where it is not as the portable graph has them.
CACHE_TYPES = {"float16": ir.DataType.FLOAT16, **dict.fromkeys(QUANTIZED_CACHES, ir.DataType.INT8)}

# Makes ``seqlens_k`` int32 [B] (total length - 1 of each row) and ``total_sequence_length`` int32 [] or [1], in front
# of a node.
Positions = Callable[[ir.Graph, ir.Node], list[ir.Value]]


def pack_projections(graph: ir.Graph, context: LoweringContext) -> int:
    """One linear and a Split for the query, key and value linears of each attention: one pass over the activation.

    Where they are to be stored differently they stay apart. Returns how many attentions were looked at.
    """
    count = 0
    for attention in nodes_of(graph, "CachedAttention", LLMC):
        linears = [_linear_before(value) for value in attention.inputs[:3]]
        if len({id(linear.node.inputs[0]) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: query, key and value do not read the same activation")
        if len({bool(linear.biases) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: only some of query, key and value have a bias")
        if len({context.quant.of(linear.module) for linear in linears}) == 1:
            _pack(graph, f"{attention.name}.qkv_proj", linears)
        count += 1
    return count


def _pack(graph: ir.Graph, name: str, linears: list[Linear]) -> None:
    first = min(linears, key=lambda linear: list(graph).index(linear.node))
    emit = Emitter(first.node, name, main="Linear")
    weights = [linear.node.inputs[1] for linear in linears]
    biases = [linear.node.inputs[2] for linear in linears if linear.biases]
    packed = emit("Linear", first.node.inputs[0], *weights, *biases, domain=LLMC, parts=len(weights))
    sizes = vector(graph, [linear.outputs for linear in linears])
    for linear, part in zip(linears, emit.many("Split", [packed, sizes], 3, axis=-1), strict=True):
        replace(linear.node, part)


def _linear_before(value: ir.Value | None) -> Linear:
    """The linear that feeds ``value``, directly or through the reshapes and the norm of qk-norm."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in ("Reshape", "RMSNormalization"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "Linear":
        raise BuildError(
            f"{value.name if value else 'attention'}: expected a linear before attention, found {node and node.op_type}"
        )
    return Linear.of(node)


def group_query_attention(graph: ir.Graph, context: LoweringContext, make_positions: Positions) -> int:
    """llmc::CachedAttention -> GroupQueryAttention; ``make_positions`` is called once, for all layers."""
    positions: list[ir.Value] = []
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    for layer, node in enumerate(attentions):
        positions = positions or make_positions(graph, node)
        query, key, value, past_key, past_value, _past_lengths, inv_freq = node.inputs
        packed = _split_source(query, key, value)
        window = node.attributes["window"].as_int()
        scales, attributes = _cache_scales(graph, layer, context)
        emit = Emitter(node, main="GroupQueryAttention")
        outputs = emit.many(
            "GroupQueryAttention",
            [
                *((packed, None, None) if packed else (query, key, value)),
                *(past_key, past_value, *positions, *rotary_tables(graph, inv_freq, context), *scales),
            ],
            3,
            MICROSOFT,
            num_heads=node.attributes["num_heads"].as_int(),
            kv_num_heads=node.attributes["kv_heads"].as_int(),
            scale=node.attributes["scale"].as_float(),
            local_window_size=window if window else -1,
            do_rotary=1,
            **attributes,
        )
        replace(node, *outputs)
    return len(attentions)


def _split_source(*parts: ir.Value | None) -> ir.Value | None:
    """The packed value, if ``parts`` are the outputs of one Split in order and nothing else reads them."""
    node = parts[0].producer() if parts[0] is not None else None
    if node is not None and node.op_type == "Split" and tuple(node.outputs) == parts:
        return node.inputs[0]
    return None


def rotary_tables(graph: ir.Graph, inv_freq: ir.Value | None, context: LoweringContext) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine [max_context, head_dim / 2] for the planned context, shared by all graphs."""
    assert inv_freq is not None and inv_freq.const_value is not None
    frequencies = inv_freq.const_value.numpy().astype(np.float32)
    angles = np.arange(context.limits.max_context, dtype=np.float32)[:, None] * frequencies[None, :]
    names = ("rotary_emb.cos", "rotary_emb.sin")
    tables = context.weights.add(names, lambda: [table(angles).astype(context.compute) for table in (np.cos, np.sin)])
    cos, sin = (initializer(graph, table) for table in tables)
    return cos, sin


def _cache_scales(
    graph: ir.Graph, layer: int, context: LoweringContext
) -> tuple[list[ir.Value | None], dict[str, str | int]]:
    """Inputs of the attention after the rotary tables, and its attributes, for a quantized cache; else nothing."""
    if context.cache not in QUANTIZED_CACHES:
        return [], {}
    scales: list[ir.Value | None] = [None, None, None]  # no position ids, no bias, no sink
    for part in ("key", "value"):
        found = kv_cache.scales(
            context.calibrated.cache_range(layer, part), per_channel=context.cache == "int8-channel"
        )
        scales.append(constant(graph, f"model.layers.{layer}.self_attn.{part}.scale", found.ravel()))
    kind = QUANTIZED_CACHES[context.cache]
    return scales, {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}


def type_cache(graph: ir.Graph, context: LoweringContext) -> int:
    """Declare the cache's inputs and outputs in the type that they are kept in."""
    if context.cache not in CACHE_TYPES:
        return 0
    values = [v for v in (*graph.inputs, *graph.outputs) if (v.name or "").startswith(("past_key_values.", "present."))]
    for value in values:
        value.type = ir.TensorType(CACHE_TYPES[context.cache])
    return len(values)
