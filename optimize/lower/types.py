"""Types of activations on GPUs: the compute type everywhere, float32 where the contract says so."""

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext


def type_values(graph: ir.Graph, context: LoweringContext) -> int:
    """Declare what is computed, its constants and the cache in the compute type; widen the other outputs. Returns the
    casts made."""
    compute = ir.TensorType(context.type)
    for node in graph:
        if node.op_type == "Constant" and node.attributes["value"].as_tensor().dtype == ir.DataType.FLOAT:
            number = node.attributes["value"].as_tensor().numpy().astype(context.array_type)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number))
    for value in [*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = compute
    wide = [] if context.compute == "float32" else [v for v in graph.outputs if v.name == "logits"]
    for value in wide:
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        [output] = cast.outputs
        cast.name, output.name, value.name = f"{value.name}.Cast", value.name, f"{value.name}.narrow"
        output.shape, output.type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        graph.append(cast)
        graph.outputs[graph.outputs.index(value)] = output
    return len(wide)
