"""Replace the linears of a graph one by one, and pack several into one, for every target."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from llmc.exported import Weight
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear, find_vector, find_weight
from llmc.optimize.lower.rewrite import LLMC, Emitter, constant, nodes_of, replace, sole_consumer, vector


def replace_linears(graph: ir.Graph, context: LoweringContext, lowered: Callable[[Linear], ir.Value]) -> int:
    """llmc::Linear -> what ``lowered`` emits for it, each part reported as done. Counts the parts of packed ones."""
    count = 0
    for node in nodes_of(graph, "Linear", LLMC):
        linear = Linear.of(node)
        replace(node, lowered(linear))
        for _ in linear.weights:
            context.linear_done()
        count += len(linear.weights)
    return count


def replace_gather(graph: ir.Graph, name: str, rows: Callable[[Emitter, Weight], ir.Value]) -> int:
    """Gather(table, ids) [-> Cast] called ``name`` -> the rows [B, S, H] that ``rows`` emits for the table."""
    count = 0
    for gather in nodes_of(graph, "Gather"):
        if gather.name == name:
            cast, gathered = sole_consumer(gather.outputs[0]), rows(Emitter(gather), find_weight(gather.inputs[0]))
            replace(gather if cast is None or cast.op_type != "Cast" else cast, gathered)
            count += 1
    return count


def inline_vectors(graph: ir.Graph, names: list[str], context: LoweringContext) -> None:
    """Make these small weights, as far as the graph has them, part of the graph, in float32."""
    for value in filter(None, map(graph.initializers.get, names)):
        values = context.calibrated.rows(find_vector(value)).astype(np.float32)
        replace_weight(value, constant(graph, f"{value.name}.float32", values))


def replace_weight(value: ir.Value, other: ir.Value) -> None:
    """Let what reads a weight, or floats made of it, read another value in float32."""
    for node, index in list(value.uses()):
        if node.op_type == "Cast":
            node.outputs[0].replace_all_uses_with(other)
        else:
            node.replace_input_with(index, other)


def pack(parts: list[Linear]) -> None:
    """Replace linears with the same input by one linear and a Split: q_proj, k_proj and v_proj by qkv_proj."""
    graph = parts[0].node.graph
    assert graph is not None
    order = {node: number for number, node in enumerate(graph)}
    first = min(parts, key=lambda part: order[part.node])
    stems = [part.name.rpartition(".")[2].removesuffix("_proj") for part in parts]
    joined = ("" if max(map(len, stems)) == 1 else "_").join(stems)
    emit = Emitter(first.node, f"{first.name.rpartition('.')[0]}.{joined}_proj", main="Linear")
    weights = [part.node.inputs[1] for part in parts]
    biases = [part.node.inputs[2] for part in parts if part.biases]
    packed = emit("Linear", first.node.inputs[0], *weights, *biases, domain=LLMC, parts=len(parts))
    sizes = vector(graph, [part.outputs for part in parts])
    for part, value in zip(parts, emit.many("Split", [packed, sizes], len(parts), axis=-1), strict=True):
        replace(part.node, value)
