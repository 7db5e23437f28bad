"""The tower of a model that sees, for ONNX Runtime."""

import numpy as np
import onnx_ir as ir

from llmc.inventory import TOWER
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.linears import replace_weight
from llmc.optimize.lower.onnxruntime.linears import float_table
from llmc.optimize.lower.raising import find_vector
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, initializer, nodes_of, replace, scalar

POSITIONS = f"{TOWER}.position_embedding.weight"


def attend_to_patches(graph: ir.Graph, _: LoweringContext) -> int:
    """Attention without cache and mask -> MultiHeadAttention, whose kernel holds no scores of all pairs."""
    nodes = list(nodes_of(graph, "Attention"))
    for node in nodes:
        heads, scale = node.attributes["q_num_heads"].as_int(), node.attributes["scale"].as_float()
        found = Emitter(node)("MultiHeadAttention", *node.inputs[:3], domain=MICROSOFT, num_heads=heads, scale=scale)
        replace(node, found)
    return len(nodes)


def store_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The table of positions in float32. What it is added to tells linears how many tokens they multiply."""
    stored = initializer(graph, float_table(find_vector(graph.initializers[POSITIONS]), "float32", context))
    replace_weight(graph.initializers[POSITIONS], stored)
    (add, _), *others = stored.uses()
    if add.op_type == "Gemm":  # positions of a grid, weighed, before they are added
        ((add, _),) = add.outputs[0].uses()
    embedded = add.outputs[0]
    after, _ = next(iter(embedded.uses()))
    graph.meta["rows"] = Emitter(after, f"{TOWER}.rows")("Gather", embedded, scalar(graph, 0, np.int64), axis=2)
    return 1 + len(others)
