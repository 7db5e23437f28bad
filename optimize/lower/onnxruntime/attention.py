"""Attention for ONNX Runtime: packed projections into GroupQueryAttention over shared buffers.

Its kernels take a head_dim that is a multiple of 8, and rotate a multiple of 16 values of one that is a multiple of 16
(tried with onnxruntime 1.31.1, in float32 and float16); other heads are rotated before.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from llmc.bundle import Geometry
from llmc.bundle.model.attention import Attention
from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import pack
from llmc.optimize.lower.raising import NORMS, Linear, find_vector
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    constant,
    emit_conversion,
    graph_input,
    nodes_of,
    replace,
    scalar,
    vector,
)
from llmc.optimize.lower.rotary import SWITCH, Pair, Tables, rotary_tables, rotations, table_pair
from llmc.optimize.quantize.ranges import cache_scales

GQA = "GroupQueryAttention"
HEAD_MULTIPLE, ROTATED_MULTIPLE = 8, 16
# Key of a graph's metadata for how far each token sees ahead, in models that see images both ways.
AHEAD = "ahead"
LOOKING = "looking ahead"
MASKED = float(np.finfo(np.float32).min)
QUANTIZED_CACHES = {"int8": "PER_TENSOR", "int8-channel": "PER_CHANNEL"}

# Makes ``seqlens_k`` int32 [B] (total length - 1 of each row) and ``total_sequence_length`` int32 [] or [1], in front
# of a node.
Lengths = Callable[[ir.Graph, ir.Node], list[ir.Value]]


def pack_projections(graph: ir.Graph, context: LoweringContext) -> int:
    """One linear and a Split for query, key and value: one pass over the activation.

    Those stored differently stay apart, and so do those that expand a latent vector. Returns how many attentions were
    looked at.
    """
    count = 0
    for attention in nodes_of(graph, "CachedAttention", LLMC):
        count += 1
        if context.attention(attention).latent:
            continue
        made = (_linear_before(value) for value in attention.inputs[:3])
        linears = list({linear.name: linear for linear in made}.values())  # keys may be values, too
        if len({id(before_sorting(linear.node.inputs[0])) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: query, key and value do not read the same activation")
        if len({bool(linear.biases) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: only some of query, key and value have a bias")
        if len({(context.quant.of(linear.module), id(linear.node.inputs[0])) for linear in linears}) == 1:
            pack(linears)
    return count


def before_sorting(value: ir.Value | None) -> ir.Value | None:
    """The activation of a linear, before its channels are put into the order of the weight's groups."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "Gather" else value


def _linear_before(value: ir.Value | None) -> Linear:
    """The linear that feeds ``value``, directly or through the reshapes and the norm of qk-norm."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in ("RotatedHeads", "Reshape", "Slice", "Mul", *NORMS):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "Linear":
        raise BuildError(
            f"{value.name if value else 'attention'}: expected a linear before attention, found {node and node.op_type}"
        )
    return Linear.of(node)


def group_query_attention(graph: ir.Graph, context: LoweringContext, make_lengths: Lengths) -> int:
    """llmc::CachedAttention -> GroupQueryAttention; ``make_lengths`` is called once, for all layers."""
    attentions = list(nodes_of(graph, "CachedAttention", LLMC))
    if not attentions:
        return 0
    lengths = make_lengths(graph, attentions[0])
    for node in attentions:
        attention, tables = context.attention(node), rotary_tables(node, context, context.attention_type)
        query, key, value, past_key, past_value = node.inputs[:5]
        if "both_ways" in node.attributes and context.takes_prompts:
            graph.meta[AHEAD] = node.inputs[6]
            if node.attributes["both_ways"].as_int():
                graph.meta.setdefault(LOOKING, set()).add(node.name)
        scales, attributes = _cache_scales(graph, attention, context)
        sinks = None
        if attention.sinks:  # one more logit of each head [H]
            logits = context.calibrated.rows(find_vector(node.inputs[6])).astype(context.attention_type.numpy())
            sinks = constant(graph, f"{node.name}.sink_logits", logits)
        emit = Emitter(node, main=GQA)
        packed = _split_source(query, key, value)
        by_axes = "axes" in node.attributes
        # The operator has one pair of tables, and rotates multiples only.
        odd = any(size % ROTATED_MULTIPLE for size in (attention.head_dim, attention.rotary_dim))
        own = tables is not None and (odd or tables.query is not tables.key)
        apart = tables is not None and (by_axes or SWITCH in graph.meta or own)
        parts = [packed, None, None] if packed and not apart else [query, key, value]
        parts = [part and emit_conversion(emit, part, context.type, context.attention_type) for part in parts]
        if tables and apart:
            turns = _tables_by_axes(graph, attentions[0], node, tables) if by_axes else tables
            places = (_token_numbers if by_axes else token_positions)(graph, attentions[0])
            parts[:2] = emit_rotation(emit, attention, parts[:2], places, turns)
            tables = None
        # Rotary tables, position ids, a bias, sinks, scales of the cache.
        optional = [*(tables.key if tables else (None, None)), None, None, sinks, *scales]
        while optional and optional[-1] is None:
            optional.pop()
        attended, *present = emit.many(
            GQA,
            [*parts, past_key, past_value, *lengths, *optional],
            3,
            MICROSOFT,
            num_heads=attention.heads,
            kv_num_heads=attention.kv_heads,
            scale=node.attributes["scale"].as_float(),
            softcap=node.attributes["softcap"].as_float(),
            local_window_size=attention.window or -1,
            do_rotary=int(tables is not None),
            rotary_interleaved=node.attributes["interleaved"].as_int(),
            **attributes,
        )
        replace(node, emit_conversion(emit, attended, context.attention_type, context.type), *present)
    return len(attentions)


def rotate_before(graph: ir.Graph, context: LoweringContext) -> None:
    turned = rotations(graph, context)
    for node, attention in turned:
        emit, positions = Emitter(node, main="RotaryEmbedding"), token_positions(graph, turned[0][0])
        heads, tables = node.attributes["num_heads"].as_int(), table_pair(node, context)
        replace(node, rotate(emit, attention.rotary_dim, heads, node.inputs[0], positions, tables))


def emit_rotation(
    emit: Emitter, attention: Attention, parts: Sequence[ir.Value | None], positions: ir.Value, tables: Tables
) -> tuple[ir.Value, ir.Value]:
    """Query and key [B, S, heads * D] of an attention, ``parts``, turned by ``positions`` [B, S]."""
    query, key = parts
    return (
        rotate(emit, attention.rotary_dim, attention.heads, query, positions, tables.query),
        rotate(emit, attention.rotary_dim, attention.kv_heads, key, positions, tables.key),
    )


def rotate(
    emit: Emitter, rotary_dim: int, heads: int, x: ir.Value | None, positions: ir.Value, tables: Pair
) -> ir.Value:
    """Heads x [B, S, heads * D] turned, interleaved if the node before which ``emit`` emits is."""
    interleaved = emit.anchor.attributes["interleaved"].as_int()
    return emit(
        "RotaryEmbedding",
        *(x, positions, *tables),
        domain=MICROSOFT,
        num_heads=heads,
        rotary_embedding_dim=rotary_dim,
        interleaved=interleaved,
    )


def emit_attention(
    emit: Emitter,
    attention: Attention,
    query: ir.Value | None,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    bias: ir.Value | None = None,
) -> ir.Value:
    """Attention [B, S, H * D] of the node before which ``emit`` emits, in basic operators: ``query`` [B, S, H * D] over
    ``keys`` and ``values`` [B, KV, 1, C, D], where ``mask`` [B, 1, 1, S, C] is true; ``bias`` [1, KV, 1, S, C] is added
    to the products."""
    graph, kv_heads = emit.graph, attention.kv_heads
    shape = [0, 0, kv_heads, attention.heads // kv_heads, attention.head_dim]
    queries = emit("Transpose", emit("Reshape", query, vector(graph, shape)), perm=[0, 2, 3, 1, 4])  # (B, KV, G, S, D)
    scale, softcap = (emit.anchor.attributes[name].as_float() for name in ("scale", "softcap"))
    alpha = scale / (softcap or 1.0)
    scores = emit("FusedMatMul", queries, keys, domain=MICROSOFT, transB=1, alpha=alpha)  # (B, KV, G, S, C)
    if bias is not None:
        scores = emit("Add", scores, bias)
    if softcap:
        scores = emit("Mul", emit("Tanh", scores), scalar(graph, softcap, np.float32))
    weights = emit("Softmax", emit("Where", mask, scores, scalar(graph, MASKED, np.float32)), axis=-1)
    mixed = emit("Transpose", emit("MatMul", weights, values), perm=[0, 3, 1, 2, 4])  # (B, S, KV, G, D)
    return emit("Reshape", mixed, vector(graph, [0, 0, attention.heads * attention.head_dim]))  # no -1: S may be 0


def check_head_sizes(geometry: Geometry) -> None:
    """Raise BuildError for heads that GroupQueryAttention has no kernel for."""
    for attention in geometry.attentions:
        if attention.head_dim % HEAD_MULTIPLE:
            raise BuildError(
                f"{attention.name} has a head_dim of {attention.head_dim}, and ONNX Runtime attends to heads whose "
                f"head_dim is a multiple of {HEAD_MULTIPLE}; build for cuda with --fp32"
            )


def emit_token_counts(graph: ir.Graph) -> ir.Value:
    """1 ... S in every row, int64 [B, S], without Shape: made once, in front of everything else."""
    if "counted" not in graph.meta:
        ids = graph_input(graph, "input_ids")
        emit = Emitter(graph[0], "positions")
        # Ones that depend on nothing but the shape of the ids. Equal would do, had it a CUDA kernel of this opset.
        ones = emit("Cast", emit("LessOrEqual", ids, ids), to=ir.DataType.INT64)
        graph.meta["counted"] = emit("CumSum", ones, scalar(graph, 1, np.int64))
    counted: ir.Value = graph.meta["counted"]
    return counted


def token_positions(graph: ir.Graph, first: ir.Node) -> ir.Value:
    """Rows of the rotary tables for the new tokens, int64 [B, S], computed once, before ``first``: their positions; in
    long texts behind the rows for short texts."""
    if "positions" not in graph.meta:
        emit = Emitter(first, "positions")
        starts = emit("Unsqueeze", graph_input(graph, "past_lengths"), vector(graph, [1]))
        if SWITCH in graph.meta:
            length, after = graph.meta[SWITCH]
            is_long = emit("Cast", emit("Greater", length, scalar(graph, after, np.int64)), to=ir.DataType.INT64)
            rows = emit("Mul", is_long, scalar(graph, after, np.int64))
            starts = emit("Add", starts, emit("Unsqueeze", rows, vector(graph, [1])))
        ends = emit("Add", starts, emit_token_counts(graph))
        graph.meta["positions"] = emit("Sub", ends, scalar(graph, 1, np.int64))
    positions: ir.Value = graph.meta["positions"]
    return positions


def _token_numbers(graph: ir.Graph, first: ir.Node) -> ir.Value:
    """Numbers of the call's tokens, row by row, int64 [B, S], computed once, before ``first``. They index tables of
    their own and replace positions."""
    if "positions" not in graph.meta:
        emit, counted = Emitter(first, "positions"), emit_token_counts(graph)
        flat = emit("Reshape", emit("LessOrEqual", counted, counted), vector(graph, [-1]))
        numbers = emit("CumSum", emit("Cast", flat, to=ir.DataType.INT64), scalar(graph, 0, np.int64))
        numbers = emit("Sub", numbers, scalar(graph, 1, np.int64))
        graph.meta["positions"] = emit("Reshape", numbers, emit("Shape", counted))  # that of ids may become another
    numbers_of_tokens: ir.Value = graph.meta["positions"]
    return numbers_of_tokens


def _tables_by_axes(graph: ir.Graph, first: ir.Node, node: ir.Node, tables: Tables) -> Tables:
    """Cosine and sine [B * S, R/2] of the call's tokens, each pair's by the axis that it turns by; made once for all
    attentions with the same rope."""
    name = str(tables.key[0].name)
    if name not in graph.meta:
        emit, axes = Emitter(first, "positions"), [*node.attributes["axes"].as_ints()]
        by_pair = emit("Gather", graph_input(graph, "positions"), vector(graph, axes), axis=0)  # (R/2, B, S)
        places = emit("Reshape", emit("Transpose", by_pair, perm=[1, 2, 0]), vector(graph, [-1, len(axes)]))
        turns = emit("GatherElements", tables.key[0], places), emit("GatherElements", tables.key[1], places)
        graph.meta[name] = Tables(turns, turns)
    tables_of_tokens: Tables = graph.meta[name]
    return tables_of_tokens


def _split_source(*parts: ir.Value | None) -> ir.Value | None:
    """The packed value, if ``parts`` are the outputs of one Split in order and nothing else reads them."""
    node = parts[0].producer() if parts[0] is not None else None
    if node is not None and node.op_type == "Split" and tuple(node.outputs) == parts:
        return node.inputs[0]
    return None


def _cache_scales(
    graph: ir.Graph, attention: Attention, context: LoweringContext
) -> tuple[list[ir.Value | None], dict[str, str | int]]:
    """The attention's inputs and attributes for a quantized cache; else nothing."""
    if context.cache not in QUANTIZED_CACHES:
        return [], {}
    scales: list[ir.Value | None] = []
    for part in ("key", "value"):
        ranges = context.calibrated.cache_range(attention.layer, part)
        held = cache_scales(ranges, per_channel=context.cache == "int8-channel")
        scales.append(constant(graph, f"{attention.name}.{part}.scale", held.ravel()))
    kind = QUANTIZED_CACHES[context.cache]
    return scales, {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}


def type_cache(graph: ir.Graph, context: LoweringContext) -> int:
    """Declare the type of the cache's inputs and outputs, which the export left float32."""
    if context.cache == "float32":
        return 0
    kind = ir.DataType.INT8 if context.cache in QUANTIZED_CACHES else context.attention_type
    values = [v for v in (*graph.inputs, *graph.outputs) if (v.name or "").startswith(("past_key_values.", "present."))]
    for value in values:
        value.type = ir.TensorType(kind)
    return len(values)
