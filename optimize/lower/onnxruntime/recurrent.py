"""Recurrent mixers for ONNX Runtime on CPUs: slices and products for convolutions, LinearAttention for recurrences.

Its other operators for them take 3 to 27 times as long as plain nodes do (onnxruntime 1.32, shapes of Qwen3.5-0.8B).
Outputs and states of this one are the same bits however a row is cut into calls and whatever rows are beside it.
"""

import numpy as np
import onnx_ir as ir

from llmc.bundle import MOST_REPLAYED, REPLAY
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import inline_vectors
from llmc.optimize.lower.onnxruntime.attention import emit_token_counts
from llmc.optimize.lower.raising import find_vector
from llmc.optimize.lower.rewrite import LLMC, MICROSOFT, Emitter, constant, nodes_of, replace, scalar, vector

END = np.iinfo(np.int64).max
# Vectors of mixers besides linears and norms.
PARAMETERS = ("A_log", "dt_bias", "D", "norm_scale", "conv.bias")


def lower_recurrences(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CausalConv and llmc::LinearAttention -> operators of the engine; the number of mixers."""
    convs, recurrences = list(nodes_of(graph, "CausalConv", LLMC)), list(nodes_of(graph, "LinearAttention", LLMC))
    for node in convs:
        _keep(node, node.inputs[2], "channels", context, x=node.inputs[0])
        _lower_conv(node, context)
    for node in recurrences:
        _keep(node, node.inputs[3], "value_heads", context, decay=node.inputs[4], beta=node.inputs[5])
        _lower_recurrence(node)
    names = [recurrent.name for recurrent in context.geometry.recurrents]
    inline_vectors(graph, [f"{name}.{part}" for name in names for part in PARAMETERS], context)
    return len(convs)


def _keep(
    node: ir.Node, state: ir.Value | None, width: str, context: LoweringContext, **parts: ir.Value | None
) -> None:
    """Output the values that a state is computed from; if prompts use the same graph, only for short calls."""
    assert state is not None
    for part, value in parts.items():
        assert value is not None
        emit = Emitter(node, f"{REPLAY}.{state.name}.{part}")
        if context.phase != "decode":
            first = vector(emit.graph, [0]), vector(emit.graph, [MOST_REPLAYED]), vector(emit.graph, [1])
            value = emit("Slice", value, *first)
        value.name, value.type = emit.name, ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape(["batch", "replayed", node.attributes[width].as_int()])
        emit.graph.outputs.append(value)


def extract_replay(graph: ir.Graph) -> ir.Graph:
    """The part of a lowered decoder that computes states from its outputs that were kept for this."""
    inputs = [value for value in graph.inputs if value.name in ("input_ids", "new_lengths") or _is_state(value)]
    for value in (value for value in graph.outputs if str(value.name).startswith(f"{REPLAY}.")):
        node, whole = value.producer(), value
        assert node is not None
        if node.name == f"{value.name}.Slice":
            assert node.inputs[0] is not None
            whole = node.inputs[0]
            whole.name, whole.type, whole.shape, value.name = value.name, value.type, value.shape, None
        inputs.append(whole)
    return ir.convenience.extract(graph, inputs, [value for value in graph.outputs if _is_state(value)])


def _is_state(value: ir.Value) -> bool:
    return str(value.name).startswith(("past_state.", "present_state."))


def _lower_conv(node: ir.Node, context: LoweringContext) -> None:
    """The sum over the taps of shifted inputs times each tap's weights."""
    x, weight, past, new_lengths = node.inputs
    assert weight is not None
    emit, tensor = Emitter(node), find_vector(weight)
    taps = context.calibrated.rows(tensor)[:, 0].T.astype(np.float32)  # (K, C)
    joined, output = emit("Concat", past, x, axis=1), None
    for tap, values in enumerate(taps):
        ends = vector(emit.graph, [tap - len(taps) + 1 or END])
        shifted = emit("Slice", joined, vector(emit.graph, [tap]), ends, vector(emit.graph, [1]))
        product = emit("Mul", shifted, constant(emit.graph, f"{tensor.name}.{tap}", np.ascontiguousarray(values)))
        output = product if output is None else emit("Add", output, product)
    assert output is not None
    steps = constant(emit.graph, f"const.steps.{len(taps) - 1}", np.arange(len(taps) - 1)[None, :, None])
    last = emit("Add", emit("Unsqueeze", new_lengths, vector(emit.graph, [1, 2])), steps)
    replace(node, output, emit("GatherND", joined, last, batch_dims=1))


def _lower_recurrence(node: ir.Node) -> None:
    q, k, v, past, decay, beta, new_lengths = node.inputs
    emit, graph = Emitter(node, main="LinearAttention"), node.graph
    assert graph is not None
    keys, values, delta = (node.attributes[name] for name in ("key_heads", "value_heads", "delta"))
    key_heads, value_heads, is_delta = keys.as_int(), values.as_int(), delta.as_float() > 0
    if (eps := node.attributes["unit_eps"].as_float()) > 0:
        q, k = (_emit_unit(emit, part, node, key_heads, eps) for part in (q, k))
    counted = emit_token_counts(graph)
    valid = emit("LessOrEqual", counted, emit("Unsqueeze", new_lengths, vector(graph, [1])))
    column, nothing = emit("Unsqueeze", valid, vector(graph, [2])), scalar(graph, 0.0, np.float32)
    decay, beta = (emit("Where", column, part, nothing) for part in (decay, beta))
    if not is_delta:  # the operator has no factor for values alone
        heads = emit("Reshape", v, vector(graph, [0, 0, value_heads, -1]))
        scaled = emit("Mul", heads, emit("Unsqueeze", beta, vector(graph, [3])))
        v, beta = emit("Reshape", scaled, vector(graph, [0, 0, -1])), None
    made = emit.many(
        "LinearAttention",
        [q, k, v, past, decay, *([beta] if is_delta else [])],
        2,
        MICROSOFT,
        q_num_heads=key_heads,
        kv_num_heads=value_heads,
        update_rule="gated_delta" if is_delta else "gated",
        scale=node.attributes["scale"].as_float(),
    )
    replace(node, *made)


def _emit_unit(emit: Emitter, part: ir.Value | None, node: ir.Node, heads: int, eps: float) -> ir.Value:
    """Heads (B, S, H * D) divided by the root of their sum of squares and ``eps``: a norm by the root mean square."""
    past = node.inputs[3]
    assert past is not None and past.shape is not None
    width = past.shape[2]
    assert isinstance(width, int)
    weight = constant(emit.graph, f"const.unit.{width}", np.full(width, width**-0.5, np.float32))
    split = emit("Reshape", part, vector(emit.graph, [0, 0, heads, width]))
    unit = emit("SimplifiedLayerNormalization", split, weight, axis=-1, epsilon=eps / width)
    return emit("Reshape", unit, vector(emit.graph, [0, 0, -1]))
