"""Quantized linears that read the same activation become one.

The builder would merge them in one optimisation profile and not in the other, and store integer weights twice for it:
the int8 engine of a small model took 34 MB, with packed weights 29 MB. Float weights it stores twice when they come
packed (44 MB instead of 35 MB), so those stay apart. Both are sizes of TensorRT-RTX 1.7.1's engines with two profiles.
"""

import onnx_ir as ir

from llmc.optimize.lower.context import Computed, LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import LLMC, Emitter, nodes_of, replace, vector

PACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def pack_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """Query, key and value, and gate and up, of each layer -> one llmc::Linear and a Split.

    Those that are to be stored as floats or differently, or of which only some have a bias, stay apart. Returns
    the packs made.
    """
    linears = {node.name or "": node for node in nodes_of(graph, "Linear", LLMC)}
    count = 0
    for name in list(linears):
        parent, _, last = name.rpartition(".")
        pack = next((pack for pack, parts in PACKS.items() if parts[0] == last), None)
        if pack is None:
            continue
        nodes = [linears.get(f"{parent}.{part}") for part in PACKS[pack]]
        parts = [Linear.of(node) for node in nodes if node is not None]
        if len(parts) == len(nodes) and _belong_together(parts, context):
            _pack(graph, f"{parent}.{pack}", parts)
            count += 1
    return count


def _belong_together(parts: list[Linear], context: LoweringContext) -> bool:
    configs = {context.quant.of(part.module) for part in parts}
    seen = {(id(part.node.inputs[0]), bool(part.biases)) for part in parts}
    return len(seen) == len(configs) == 1 and not isinstance(configs.pop(), Computed)


def _pack(graph: ir.Graph, name: str, parts: list[Linear]) -> None:
    order = {node: number for number, node in enumerate(graph)}
    first = min(parts, key=lambda part: order[part.node])
    emit = Emitter(first.node, name, main="Linear")
    weights = [part.node.inputs[1] for part in parts]
    biases = [part.node.inputs[2] for part in parts if part.biases]
    packed = emit("Linear", first.node.inputs[0], *weights, *biases, domain=LLMC, parts=len(parts))
    sizes = vector(graph, [part.outputs for part in parts])
    for part, value in zip(parts, emit.many("Split", [packed, sizes], len(parts), axis=-1), strict=True):
        replace(part.node, value)
