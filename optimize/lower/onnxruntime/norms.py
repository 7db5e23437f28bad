"""Norms and activation functions, fused as ONNX Runtime's kernels have them."""

import numpy as np
import onnx_ir as ir

from llmc.exported import Weight
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import inline_vectors, replace_weight
from llmc.optimize.lower.raising import find_vector, find_weight, head_scales, norm_nodes
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, nodes_of, replace, sole_consumer

# By the operator of the portable graph: the kernel, and the one that adds first.
KERNELS = {
    # Its twin that older engines know too.
    "RMSNormalization": ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
    "LayerNormalization": ("LayerNormalization", "SkipLayerNormalization"),
}


def lower_norms(graph: ir.Graph, context: LoweringContext) -> int:
    """RMSNormalization and LayerNormalization -> their kernels, weights inline."""
    for scale in head_scales(graph):
        replace_weight(scale, _keep(graph, find_vector(scale), context))
    norms = norm_nodes(graph)
    for norm in norms:
        kernel, _ = KERNELS[norm.op_type]
        tensors = [find_weight(value) for value in norm.inputs[1:]]
        weights = [_fold_gain(norm, tensor, context) or _keep(graph, tensor, context) for tensor in tensors]
        epsilon = norm.attributes["epsilon"].as_float()
        replace(norm, Emitter(norm, main=kernel)(kernel, norm.inputs[0], *weights, axis=-1, epsilon=epsilon))
    return len(norms)


def _keep(graph: ir.Graph, tensor: Weight, context: LoweringContext) -> ir.Value:
    values = context.calibrated.rows(tensor).astype(context.compute)
    return constant(graph, f"{tensor.name}.{context.compute}", values)


def _fold_gain(norm: ir.Node, tensor: Weight, context: LoweringContext) -> ir.Value | None:
    """Ones in the place of the weight of a norm that reads a rotated stream; the linears behind it take the weight."""
    if not context.rotated or norm.name not in context.geometry.read_norms:
        return None
    assert norm.graph is not None
    context.gains[norm.name or ""] = gain = context.calibrated.rows(tensor)
    return constant(norm.graph, f"ones.{len(gain)}", np.ones_like(gain))


def fuse_skip_norms(graph: ir.Graph, _: LoweringContext) -> int:
    """A norm of Add(residual, x) -> the kernel that adds first, and hands on the sum too."""
    count, fused = 0, dict(KERNELS.values())
    for norm in [node for node in graph if node.op_type in fused]:
        add = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if add is None or add.op_type != "Add":
            continue
        kernel = fused[norm.op_type]
        outputs = Emitter(norm, main=kernel).many(
            kernel, [*add.inputs, *norm.inputs[1:]], 4, MICROSOFT, epsilon=norm.attributes["epsilon"].as_float()
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


def inline_scalars(graph: ir.Graph, context: LoweringContext) -> int:
    """Make the factor at the end of each layer and the scalars of activations a part of the graph, in float32."""
    names = [name for name in graph.initializers if name.endswith(".layer_scalar")]
    names += [f"{mlp.name}.{scalar}" for mlp in context.geometry.mlps for scalar in mlp.learned]
    inline_vectors(graph, names, context)
    return len(names)
