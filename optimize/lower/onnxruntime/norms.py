"""Norms and the activation function, fused as ONNX Runtime's CPU kernels have them."""

import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import stored
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, nodes_of, replace, sole_consumer


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """RMSNormalization -> SimplifiedLayerNormalization, its twin that older engines know too, weights inline."""
    count = 0
    for norm in nodes_of(graph, "RMSNormalization"):
        tensor = stored(norm.inputs[1])
        weight = constant(
            graph, f"{tensor.name}.{context.compute}", context.calibrated.rows(tensor).astype(context.compute)
        )
        epsilon = norm.attributes["epsilon"].as_float()
        emit = Emitter(norm, main="SimplifiedLayerNormalization")
        replace(norm, emit("SimplifiedLayerNormalization", norm.inputs[0], weight, axis=-1, epsilon=epsilon))
        count += 1
    return count


def fuse_skip_norms(graph: ir.Graph, _: LoweringContext) -> int:
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


def fuse_silu(graph: ir.Graph, _: LoweringContext) -> int:
    """Mul(x, Sigmoid(x)) -> QuickGelu(x, alpha=1): one pass instead of two."""
    count = 0
    for sigmoid in nodes_of(graph, "Sigmoid"):
        product = sole_consumer(sigmoid.outputs[0])
        if product is None or product.op_type != "Mul" or sigmoid.inputs[0] not in product.inputs:
            continue
        replace(product, Emitter(product)("QuickGelu", sigmoid.inputs[0], domain=MICROSOFT, alpha=1.0))
        count += 1
    return count
