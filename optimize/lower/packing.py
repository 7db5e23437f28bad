"""Linears that read the same activation become one.

ONNX Runtime's CUDA kernels reach less of the memory's bandwidth the fewer outputs a product has. TensorRT's builder
merges them in one optimisation profile only, and stores integer weights twice for it; on Thor its own merging computes
wrong tokens in floats (:mod:`llmc.optimize.tensorrt.flags`). TensorRT-RTX stores packed floats twice (44 MB instead of
35 MB) and does not serve Thor: there they stay apart.
"""

from itertools import groupby

import onnx_ir as ir

from llmc.optimize.lower.context import Computed, LoweringContext
from llmc.optimize.lower.linears import pack
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, nodes_of


def pack_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """Linears of an attention or an MLP that read the same -> one llmc::Linear and a Split.

    Those that are to be stored differently, or of which only some have a bias, stay apart. Returns the packs made.
    """
    return _pack(graph, context, floats=True)


def pack_integers(graph: ir.Graph, context: LoweringContext) -> int:
    """Pack linears like :func:`pack_linears`, but only those stored in fewer bits than they compute in."""
    return _pack(graph, context, floats=False)


def _pack(graph: ir.Graph, context: LoweringContext, *, floats: bool) -> int:
    nodes = {node.name: node for node in nodes_of(graph, "Linear", LLMC)}
    count = 0
    for readers in context.geometry.readers:
        for _, group in groupby(readers, lambda linear: linear.name.rpartition(".")[0]):
            listed = list(group)
            parts = [Linear.of(nodes[linear.name]) for linear in listed if linear.name in nodes]
            configs = {context.quant.of(part.module) for part in parts}
            seen = {(id(part.node.inputs[0]), bool(part.biases)) for part in parts}
            together = len(parts) == len(listed) > 1 and len(seen) == len(configs) == 1
            if together and (floats or not isinstance(configs.pop(), Computed)):
                pack(parts)
                count += 1
    return count
