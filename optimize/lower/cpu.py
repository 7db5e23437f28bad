"""Lowering for ONNX Runtime on CPUs: the operators of its hot path, weights in the layouts its kernels stream."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.optimize.lower.plan import Float32, Form, PerToken, Plan, WeightOnly
from llmc.optimize.lower.raising import Linear, stored
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid, Quantized, pack_blocks
from llmc.optimize.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    constant,
    initializer,
    nodes_of,
    replace,
    scalar,
    sizes,
    sole_consumer,
    vector,
)
from llmc.optimize.weights import in_parallel, pieces, rows_of

# int8 arithmetic inside MatMulNBits; without it 8-bit weights are expanded to float32 on every call (165x slower).
ACCURACY_INT8 = 4
# A row of zeros would divide by zero; any smaller activation is below float32's resolution of the next layer anyway.
SMALLEST_ACTIVATION = 1e-9


# ------------------------------------------------------------------------------------------------ attention


def pack_projections(graph: ir.Graph, _: Plan) -> int:
    """One linear and a Split for the query, key and value linears of each attention: one pass over the activation."""
    count = 0
    for attention in nodes_of(graph, "CachedAttention", LLMC):
        linears = [_linear_before(value) for value in attention.inputs[:3]]
        if len({id(linear.node.inputs[0]) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: query, key and value do not read the same activation")
        if len({bool(linear.biases) for linear in linears}) != 1:
            raise BuildError(f"{attention.name}: only some of query, key and value have a bias")
        first = min(linears, key=lambda linear: list(graph).index(linear.node))
        emit = Emitter(first.node, f"{attention.name}.qkv_proj", main="Linear")
        weights = [linear.node.inputs[1] for linear in linears]
        biases = [linear.node.inputs[2] for linear in linears if linear.biases]
        packed = emit("Linear", first.node.inputs[0], *weights, *biases, domain=LLMC, parts=len(weights))
        sizes = vector(graph, [linear.outputs for linear in linears])
        for linear, part in zip(linears, emit.many("Split", [packed, sizes], 3, axis=-1), strict=True):
            replace(linear.node, part)
        count += 1
    return count


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


def lower_attention(graph: ir.Graph, plan: Plan) -> int:
    """llmc::CachedAttention -> GroupQueryAttention over the shared buffers, rotary tables as constants."""
    count = 0
    positions: list[ir.Value] = []
    for node in nodes_of(graph, "CachedAttention", LLMC):
        positions = positions or _positions(graph, node)
        query, key, value, past_key, past_value, _past_lengths, inv_freq = node.inputs
        cos, sin = _rotary_tables(graph, inv_freq, plan)
        packed = _split_source(query, key, value)
        window = node.attributes["window"].as_int()
        emit = Emitter(node, main="GroupQueryAttention")
        outputs = emit.many(
            "GroupQueryAttention",
            [*((packed, None, None) if packed else (query, key, value)), past_key, past_value, *positions, cos, sin],
            3,
            MICROSOFT,
            num_heads=node.attributes["num_heads"].as_int(),
            kv_num_heads=node.attributes["kv_heads"].as_int(),
            scale=node.attributes["scale"].as_float(),
            local_window_size=window if window else -1,
            do_rotary=1,
        )
        replace(node, *outputs)
        count += 1
    return count


def _split_source(*parts: ir.Value | None) -> ir.Value | None:
    """The packed value, if ``parts`` are the outputs of one Split in order and nothing else reads them."""
    node = parts[0].producer() if parts[0] is not None else None
    if node is not None and node.op_type == "Split" and tuple(node.outputs) == parts:
        return node.inputs[0]
    return None


def _positions(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    """``seqlens_k`` int32 [B] (total length - 1 of each row) and ``total_sequence_length`` int32 [] for all layers."""
    ids, past_lengths = (next(i for i in graph.inputs if i.name == name) for name in ("input_ids", "past_lengths"))
    emit = Emitter(first, "positions")
    sequence = emit("Shape", ids, start=1, end=2)
    totals = emit("Cast", emit("Add", past_lengths, sequence), to=ir.DataType.INT32)
    longest = emit("ReduceMax", totals, keepdims=0)
    return [emit("Sub", totals, scalar(graph, 1, np.int32)), longest]


def _rotary_tables(graph: ir.Graph, inv_freq: ir.Value | None, plan: Plan) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine float32 [max_context, head_dim / 2] for the planned context, shared by all graphs."""
    assert inv_freq is not None and inv_freq.const_value is not None
    frequencies = inv_freq.const_value.numpy().astype(np.float32)
    angles = np.arange(plan.limits.max_context, dtype=np.float32)[:, None] * frequencies[None, :]
    tables = plan.weights.add(("rotary_emb.cos", "rotary_emb.sin"), lambda: (np.cos(angles), np.sin(angles)))
    cos, sin = (initializer(graph, table) for table in tables)
    return cos, sin


# ------------------------------------------------------------------------------------------------ norms and activation


def lower_norms(graph: ir.Graph, _: Plan) -> int:
    """RMSNormalization -> SimplifiedLayerNormalization, its twin that older engines know too, weights inline."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor = stored(norm.inputs[1])
        weight = constant(graph, f"{tensor.name}.float32", rows_of(tensor))
        epsilon = norm.attributes["epsilon"].as_float()
        emit = Emitter(norm, main="SimplifiedLayerNormalization")
        replace(norm, emit("SimplifiedLayerNormalization", norm.inputs[0], weight, axis=-1, epsilon=epsilon))
        count += 1
    return count


def fuse_skip_norms(graph: ir.Graph, _: Plan) -> int:
    """SimplifiedLayerNormalization(Add(residual, x)) -> SkipSimplifiedLayerNormalization; it hands on the sum too."""
    count = 0
    for norm in nodes_of(graph, "SimplifiedLayerNormalization"):
        add = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if add is None or add.op_type != "Add":
            continue
        emit = Emitter(norm, main="SkipSimplifiedLayerNormalization")
        outputs = emit.many(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, norm.inputs[1]],
            4,
            MICROSOFT,
            epsilon=norm.attributes["epsilon"].as_float(),
        )
        replace(norm, outputs[0])
        replace(add, outputs[3])
        for unused in outputs[1:3]:
            unused.name = ""
        count += 1
    return count


def fuse_silu(graph: ir.Graph, _: Plan) -> int:
    """Mul(x, Sigmoid(x)) -> QuickGelu(x, alpha=1): one pass instead of two."""
    count = 0
    for sigmoid in nodes_of(graph, "Sigmoid"):
        product = sole_consumer(sigmoid.outputs[0])
        if product is None or product.op_type != "Mul" or sigmoid.inputs[0] not in product.inputs:
            continue
        replace(product, Emitter(product)("QuickGelu", sigmoid.inputs[0], domain=MICROSOFT, alpha=1.0))
        count += 1
    return count


# ------------------------------------------------------------------------------------------------ linears and embedding


def lower_linears(graph: ir.Graph, plan: Plan) -> int:
    """llmc::Linear -> the operator of the form that the plan asks for."""
    activations: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    count = 0
    for node in nodes_of(graph, "Linear", LLMC):
        linear = Linear.of(node)
        form: Form = plan.head if node.name == "lm_head" else plan.body
        match form:
            case Float32():
                output = _float_linear(linear, plan)
            case WeightOnly(grid):
                output = _blocked_linear(linear, grid, plan)
            case PerToken(grid):
                output = _per_token_linear(linear, grid, plan, activations)
        replace(node, output)
        plan.linear_done()
        count += 1
    return count


def _float_linear(linear: Linear, plan: Plan) -> ir.Value:
    emit = Emitter(linear.node)
    name = linear.weights[0].name if len(linear.weights) == 1 else f"{linear.name}.weight"
    (weight,) = plan.weights.add([f"{name}.float32"], lambda: [float_rows(linear.weights)])
    output = emit("FusedMatMul", linear.node.inputs[0], initializer(emit.graph, weight), domain=MICROSOFT, transB=1)
    return emit("Add", output, _bias(emit.graph, linear)) if linear.biases else output


def _blocked_linear(linear: Linear, grid: Grid, plan: Plan) -> ir.Value:
    emit = Emitter(linear.node, main="MatMulNBits")
    weight, scales = (initializer(emit.graph, t) for t in blocked(linear.weights, grid, plan))
    return emit(
        "MatMulNBits",
        *(linear.node.inputs[0], weight, scales),
        *((None, None, _bias(emit.graph, linear)) if linear.biases else ()),
        domain=MICROSOFT,
        K=linear.inputs,
        N=linear.outputs,
        bits=grid.bits,
        block_size=grid.block,
        accuracy_level=ACCURACY_INT8,
    )


def _per_token_linear(
    linear: Linear, grid: Grid, plan: Plan, activations: dict[ir.Value, tuple[ir.Value, ir.Value]]
) -> ir.Value:
    """y = (q @ W) * weight scale [N] * token scale [M]: the integer product is exact, so no row depends on another."""
    emit = Emitter(linear.node)
    x = linear.node.inputs[0]
    assert x is not None
    if x not in activations:
        activations[x] = _quantize_tokens(linear, x)
    tokens, token_scales = activations[x]
    names = (f"{linear.name}.int8", f"{linear.name}.int8.scales")
    weight, scales = (initializer(emit.graph, t) for t in plan.weights.add(names, lambda: by_column(linear, grid)))
    product = emit(
        "MatMulIntegerToFloat",
        *(tokens, weight, scalar(emit.graph, 1.0, np.float32), scales),
        scalar(emit.graph, 128, np.uint8),
        domain=MICROSOFT,
    )
    output = emit("Mul", product, token_scales)
    if linear.biases:
        output = emit("Add", output, _bias(emit.graph, linear))
    return emit("Reshape", output, _rows_shape(emit))


def _quantize_tokens(linear: Linear, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Activation x [B, S, K] -> uint8 [M, K] around 128 and its scales float32 [M, 1], M = B x S."""
    emit = Emitter(linear.node, f"{linear.name}.input")
    graph = emit.graph
    last = vector(graph, [-1])
    flat = emit("Reshape", x, vector(graph, [-1, linear.inputs]))
    # Two reductions read the activation twice; an Abs would write it as well.
    high, low = (emit(reduce, flat, last, keepdims=1) for reduce in ("ReduceMax", "ReduceMin"))
    largest = emit("Max", high, emit("Neg", low), scalar(graph, SMALLEST_ACTIVATION, np.float32))
    scales = emit("Mul", largest, scalar(graph, 1 / 127, np.float32))
    row_scales = emit("Squeeze", scales, last)
    zero_points = _once(
        graph,
        "activation.zero_points",
        lambda: emit("Expand", vector(graph, [128], np.uint8), emit("Shape", row_scales)),
    )
    return emit("QuantizeLinear", flat, row_scales, zero_points, axis=0), scales


def defer_token_scales(graph: ir.Graph, _: Plan) -> int:
    """Mul(a, y * scales) -> quantize  becomes  Mul(a, y) -> quantize, with the scales multiplied in after the product.

    Quantization per token does not see a factor per token, so the widest multiplication of each layer goes away.
    """
    count = 0
    for gate in nodes_of(graph, "Mul"):
        reshape = gate.inputs[1].producer() if gate.inputs[1] is not None else None
        scaled = reshape.inputs[0].producer() if reshape is not None and reshape.inputs[0] is not None else None
        flat = sole_consumer(gate.outputs[0])
        quantize = flat and next((user for user, _ in flat.outputs[0].uses() if user.op_type == "QuantizeLinear"), None)
        if not flat or not reshape or not scaled or not quantize:
            continue
        if (flat.op_type, reshape.op_type, scaled.op_type) != ("Reshape", "Reshape", "Mul"):
            continue
        if sole_consumer(reshape.outputs[0]) is not gate:
            continue
        squeeze = quantize.inputs[1].producer() if quantize.inputs[1] is not None else None
        assert squeeze is not None and squeeze.inputs[0] is not None
        product, scales = scaled.inputs
        reshape.replace_input_with(0, product)
        own = squeeze.inputs[0]
        for user, index in list(own.uses()):
            if user is not squeeze:
                user.replace_input_with(index, Emitter(user, f"{user.name}.scales")("Mul", own, scales))
        count += 1
    return count


def _rows_shape(emit: Emitter) -> ir.Value:
    """The shape (batch, sequence, -1) that turns [M, N] back into [B, S, N]."""
    ids = emit.graph.inputs[0]
    return _once(
        emit.graph, "activation.rows", lambda: emit("Concat", emit("Shape", ids), vector(emit.graph, [-1]), axis=0)
    )


def _once(graph: ir.Graph, key: str, make: Callable[[], ir.Value]) -> ir.Value:
    """A value made by its first user, in front of it, and shared by all later ones."""
    if key not in graph.meta:
        graph.meta[key] = make()
    value: ir.Value = graph.meta[key]
    return value


def _bias(graph: ir.Graph, linear: Linear) -> ir.Value:
    return constant(graph, f"{linear.name}.bias.float32", linear.bias())


def lower_embedding(graph: ir.Graph, plan: Plan) -> int:
    """Gather(embedding, ids) -> a gather that reads only the rows asked for, in the form that a tied head has."""
    count = 0
    for gather in nodes_of(graph, "Gather"):
        if gather.name != "model.embed_tokens":
            continue
        table, emit = stored(gather.inputs[0]), Emitter(gather)
        if isinstance(plan.embedding, WeightOnly):
            rows = _blocked_rows(emit, (table,), plan.embedding.grid, plan)
        else:
            (weight,) = plan.weights.add([f"{table.name}.float32"], lambda: [float_rows((table,))])  # noqa: B023
            rows = emit("Gather", initializer(graph, weight), gather.inputs[1], axis=0)
        cast = sole_consumer(gather.outputs[0])
        replace(gather if cast is None or cast.op_type != "Cast" else cast, rows)
        count += 1
    return count


def _blocked_rows(emit: Emitter, table: tuple[ir.ExternalTensor], grid: Grid, plan: Plan) -> ir.Value:
    """Dequantized rows [B, S, H] of a blocked matrix."""
    packed, scales = blocked(table, grid, plan)
    hidden = sizes(table[0])[1]
    weight = initializer(emit.graph, plan.weights.view(packed, sizes(packed)))
    scale_rows = initializer(emit.graph, plan.weights.view(scales, (*sizes(scales), 1)))
    groups = emit(
        "GatherBlockQuantized",
        *(weight, emit.anchor.inputs[1], scale_rows),
        domain=MICROSOFT,
        bits=grid.bits,
        block_size=grid.block,
        gather_axis=0,
        quantize_axis=2,
    )
    rows = emit("Reshape", groups, vector(emit.graph, [0, 0, -1]))
    if hidden % grid.block:
        rows = emit("Slice", rows, vector(emit.graph, [0]), vector(emit.graph, [hidden]), vector(emit.graph, [-1]))
    return rows


# ------------------------------------------------------------------------------------------------ weights


def blocked(weights: tuple[ir.ExternalTensor, ...], grid: Grid, plan: Plan) -> list[ir.ExternalTensor]:
    """Packed weights uint8 [N, groups, bytes] and scales [N, groups] of one or more stacked matrices."""
    name = f"{'+'.join(weight.name or '' for weight in weights)}.int{grid.bits}x{grid.block}"

    def make() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        quantized = quantize_matrix(weights, grid)
        return pack_blocks(quantized.values, grid), quantized.scales

    return plan.weights.add((name, f"{name}.scales"), make)


def by_column(linear: Linear, grid: Grid) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights int8 [K, N] with scales float32 [N], as integer matrix products want them."""
    quantized = quantize_matrix(linear.weights, grid)
    return quantized.values.T, quantized.scales[:, 0]


def quantize_matrix(weights: tuple[ir.ExternalTensor, ...], grid: Grid) -> Quantized:
    """Quantize stacked matrices row by row in pieces on all cores; only integers and scales stay in memory."""
    spans = [(weight, span) for weight in weights for span in pieces(sizes(weight))]
    parts = list(in_parallel(lambda item: rtn.quantize(rows_of(item[0], *item[1]), grid), spans))
    return Quantized(
        np.concatenate([part.values for part in parts]), np.concatenate([part.scales for part in parts]), grid
    )


def float_rows(weights: tuple[ir.ExternalTensor, ...]) -> NDArray[np.float32]:
    """Stacked matrices as float32 [N, K]."""
    return np.concatenate([rows_of(weight, *span) for weight in weights for span in pieces(sizes(weight))])
