"""Hidden states as an output, for a draft head that reads them."""

import onnx_ir as ir

from llmc.bundle.model.names import HIDDEN
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, initializer, node_after, vector
from llmc.optimize.quantize.rotation import rotation

# Key of a graph's metadata for the value that maps places in rows to packed tokens.
SLOTS = "slots"
# Key of a graph's metadata for the last hidden states, if the last layers compute only rows with logits.
LAST_ROWS = "last_rows"


def give_hidden(graph: ir.Graph, context: LoweringContext) -> int:
    """Add the output ``hidden`` float32 [B, S, borders * H]: the residual stream after each border, side by side, in
    the basis of the checkpoint; if layers share caches, only the last one, [B, O, H]. Returns the number of borders."""
    width, count = context.geometry.hidden_size, len(context.hidden)
    if not count:
        return 0
    values = {value.name: value for node in graph for value in node.outputs}
    last = graph.meta.get(LAST_ROWS, values[f"hidden.{max(context.hidden)}"])
    emit = Emitter(node_after(last), HIDDEN)
    given = [last] if LAST_ROWS in graph.meta else [values[f"hidden.{border}"] for border in context.hidden]
    states = emit("Concat", *given, axis=-1)
    if context.rotated:
        (tensor,) = context.weights.add([f"rotation.{width}"], lambda: [rotation(width)])
        apart = emit("Reshape", states, vector(graph, [0, 0, count, width]))
        turned = emit("FusedMatMul", apart, initializer(graph, tensor), domain=MICROSOFT, transB=1)
        states = emit("Reshape", turned, vector(graph, [0, 0, -1]))
    if SLOTS in graph.meta:
        states = emit("Gather", emit("Squeeze", states, vector(graph, [0])), graph.meta[SLOTS], axis=0)
    states.name, states.type = HIDDEN, ir.TensorType(ir.DataType.FLOAT)
    states.shape = ir.Shape(["batch", "outputs" if LAST_ROWS in graph.meta else "sequence", count * width])
    graph.outputs.append(states)
    return count
