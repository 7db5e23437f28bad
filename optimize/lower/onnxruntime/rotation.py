"""The residual stream of a graph in another basis, where no few channels are far larger than the rest.

Behind the embedding the stream is multiplied by an orthogonal Q, and so is what is added behind layers. A norm by the
root mean square commutes with Q once its weight is folded into the linears that read it: these multiply by
W diag(weight) Q, and those that write to the stream by Q^T W. Before the head Q^T and the last norm's weight lead back.
Keys, values and logits stay as they are, so that the graphs of prefill and decode need not agree on a basis.
"""

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.names import HEAD
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, MICROSOFT, Emitter, constant, graph_input, initializer, nodes_of, vector
from llmc.optimize.quantize.grid import Float
from llmc.optimize.quantize.rotation import hadamard, rotate_blocks, rotation

# KL of SmolLM2-135M: 0.0106 in blocks of 64, 0.0099 of 128, which take 2 % longer for a chunk of a 0.5B model.
BLOCK = 128
# The same in encoders, and the linears that read a norm, or the values between an MLP's linears.
ENCODED_BLOCK, ENCODED = 32, tuple(f".{name}_proj" for name in ("q", "k", "v", "gate", "up", "down"))


def rotate_stream(graph: ir.Graph, context: LoweringContext) -> int:
    """Multiply what goes into the first layer by Q, and what the head reads by Q^T; returns the products made.

    Norms are lowered before, and have left their weights in ``context.gains``; linears are lowered after.
    """
    if not context.rotated:
        return 0
    geometry = context.geometry
    (tensor,) = context.weights.add([f"rotation.{geometry.hidden_size}"], lambda: [rotation(geometry.hidden_size)])
    matrix = initializer(graph, tensor)
    embedded = next(value for node in graph for value in node.outputs if value.name == "hidden.0")
    readers = list(embedded.uses())
    first = next(node for node in graph if embedded in node.inputs)
    rotated = Emitter(first, "hidden.0")("MatMul", embedded, matrix)
    for node, index in readers:
        node.replace_input_with(index, rotated)
    _rotate_deep_rows(graph, matrix, geometry.hidden_size)
    head = next(node for node in nodes_of(graph, "Linear", LLMC) if node.name == HEAD)
    emit = Emitter(head, f"{HEAD}.input")
    back = emit("FusedMatMul", head.inputs[0], matrix, domain=MICROSOFT, transB=1)
    gain = constant(graph, f"{HEAD}.input.gain", context.gains[geometry.linear[HEAD].producer])
    head.replace_input_with(0, emit("Mul", back, gain))
    return 2


def _rotate_deep_rows(graph: ir.Graph, matrix: ir.Value, width: int) -> None:
    """Parts of images' rows that are added behind layers, by Q as well: in one product, however many there are."""
    gathers = [node for node in nodes_of(graph, "Gather") if str(node.name).startswith("deep_rows.")]
    if not gathers:
        return
    emit, last = Emitter(gathers[0], "deep_rows"), vector(graph, [1])
    end = width * (1 + len(gathers))
    parts = emit("Slice", graph_input(graph, "embeddings"), vector(graph, [width]), vector(graph, [end]), last)
    turned = emit("MatMul", emit("Reshape", parts, vector(graph, [-1, width])), matrix)
    rows = emit("Reshape", turned, vector(graph, [-1, width * len(gathers)]))
    for number, gather in enumerate(gathers):
        ends = (vector(graph, [width * (number + more)]) for more in (0, 1))
        gather.replace_input_with(0, emit("Slice", rows, *ends, last))


def read_weights(linear: Linear, context: LoweringContext, block: int = 0) -> Float:
    """The matrix of a linear, float32 [N, K], in the graph's basis; of its inputs ``block`` at a time are mixed."""
    matrix: Float = context.calibrated.matrix(linear.weights)
    producer = "" if linear.module == HEAD else context.geometry.linear[linear.module].producer
    matrix = turn_inputs(matrix, context.gains.get(producer), block)
    return turn_outputs(matrix) if _writes_stream(linear, context) else matrix


def turn_inputs(matrix: Float, gain: Float | None, block: int) -> Float:
    """Rows [N, K] for rotated inputs: the stream behind a norm with weight ``gain`` [K] (None: no rotation), or inputs
    mixed in blocks of ``block`` (0: not mixed)."""
    if gain is not None:
        matrix = np.matmul(matrix * gain, rotation(len(gain)))
    return rotate_blocks(matrix, block) if block else matrix


def turn_outputs(matrix: Float) -> Float:
    """The matrix [N, K] of a linear that writes to the rotated stream."""
    turned: Float = np.matmul(rotation(len(matrix)).T, matrix)
    return turned


def count_mixed(module: str, inputs: int, encodes: bool = False) -> int:
    """Block of neighbouring inputs that are mixed before quantization, 0 for none.

    The widest values of an MLP have outliers in other channels for each token, so no fixed basis helps there. Encoders
    (``encodes``) are not rotated, so what their norms give is mixed, too, in blocks that cost little of the time.
    """
    block = min(ENCODED_BLOCK if encodes else BLOCK, inputs & -inputs)
    return block if block > 1 and module.endswith(ENCODED if encodes else (".down_proj",)) else 0


def mix(emit: Emitter, x: ir.Value, block: int) -> ir.Value:
    """x [B, S, K] -> [B, S, K / block, block], each block times a Hadamard matrix."""
    blocks = emit("Reshape", x, vector(emit.graph, [0, 0, -1, block]))
    return emit("MatMul", blocks, constant(emit.graph, f"hadamard.{block}", hadamard(block)))


def read_bias(linear: Linear, context: LoweringContext) -> Float:
    """The bias of a linear, float32 [N], in the basis of the graph."""
    bias = context.calibrated.matrix(linear.biases)
    return bias @ rotation(linear.outputs) if _writes_stream(linear, context) else bias


def _writes_stream(linear: Linear, context: LoweringContext) -> bool:
    return context.rotated and linear.module in context.geometry.writers
