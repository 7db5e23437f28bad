"""The tower of a model that sees or hears, for ONNX Runtime."""

from collections.abc import Iterator
from dataclasses import replace as change

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.geometry import Geometry
from llmc.bundle.model.vision import TOWER
from llmc.optimize.lower.context import HEAD_BLOCK, GraphPlan, LoweringContext, QuantConfigs, WeightOnly
from llmc.optimize.lower.linears import inline_vectors, replace_weight
from llmc.optimize.lower.onnxruntime.linears import float_table
from llmc.optimize.lower.raising import find_vector, weight_value
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, graph_input, initializer, nodes_of, replace, scalar, vector
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.weights.store import Calibrated

POSITIONS = f"{TOWER}.position_embedding.weight"


def choose_configs(stored: QuantConfigs) -> QuantConfigs:
    """The storage of a tower's linears: 8 bits in small blocks if the decoder has integers, because every image or
    recording suffers from the tower's errors."""
    integers = isinstance(stored.body, WeightOnly)
    return change(stored, body=WeightOnly(Grid(8, HEAD_BLOCK)) if integers else stored.body, w8a8=None)


def plan_tower(base: LoweringContext, stored: QuantConfigs, target: str) -> Iterator[GraphPlan]:
    """The tower's graph, if the model has one; ``stored`` is the storage of the decoder."""
    if (tower := base.geometry.tower) is not None:
        geometry = change(base.geometry, layers=tower.layers, linears=tower.linears, caches=(), attentions=())
        stored, weights = choose_configs(stored), base.weights
        own = LoweringContext(tower.graph, geometry, base.limits, stored, weights, Calibrated(), unsigned=base.unsigned)
        name, file = tower.graph, f"{tower.graph}.onnx"
        yield GraphPlan(name, file, f"the {name} tower", f"{target}-tower", own, file)


def attend_to_patches(graph: ir.Graph, _: LoweringContext) -> int:
    """Attention without cache -> MultiHeadAttention. Without a mask its kernel never holds all scores; windows need a
    mask behind their patches, but have few scores."""
    nodes, counts = list(nodes_of(graph, "Attention")), None
    for node in nodes:
        emit, inputs = Emitter(node), list(node.inputs[:3])
        if len(node.inputs) > 3:
            if counts is None:  # patches of each window, int32 [W]
                first, windows = Emitter(graph[0], f"{TOWER}.windows"), graph_input(graph, "windows")
                seen = first("Cast", first("GreaterOrEqual", windows, scalar(graph, 0, np.int64)), to=ir.DataType.INT32)
                counts = first("ReduceSum", seen, vector(graph, [1]), keepdims=0)
            inputs += [None, counts]
        heads, scale = node.attributes["q_num_heads"].as_int(), node.attributes["scale"].as_float()
        replace(node, emit("MultiHeadAttention", *inputs, domain=MICROSOFT, num_heads=heads, scale=scale))
    return len(nodes)


def turn_patches(graph: ir.Graph, _: LoweringContext) -> int:
    """RotaryEmbedding -> that of older engines, whose tables have a row for each patch."""
    nodes = list(nodes_of(graph, "RotaryEmbedding"))
    for node in nodes:
        emit = Emitter(node)
        tables = [emit("Squeeze", table, vector(graph, [0])) for table in node.inputs[1:3]]
        heads, start = node.attributes["num_heads"].as_int(), vector(graph, [0])
        replace(node, emit("RotaryEmbedding", node.inputs[0], start, *tables, domain=MICROSOFT, num_heads=heads))
    return len(nodes)


def count_turns(geometry: Geometry) -> int:
    """Number of rotations of queries and keys by where patches are."""
    patching = geometry.vision.patching if geometry.vision else None
    return 0 if geometry.vision is None or patching is None or patching.naflex else 2 * geometry.vision.attentions


def count_convolutions(geometry: Geometry) -> int:
    """Number of layers that mix patches by a convolution."""
    return sum(linear.name.endswith(".conv.in_proj") for linear in geometry.linears)


def inline_convolutions(graph: ir.Graph, context: LoweringContext) -> int:
    """Weights of convolutions become part of the graph, in float32."""
    names = [name for name in graph.initializers if name.endswith(".conv.weight")]
    inline_vectors(graph, names, context)
    return len(names)


def has_table(geometry: Geometry) -> bool:
    """True if the tower adds learned positions."""
    vision = geometry.vision
    patching = vision.patching if vision else None
    return vision is not None and (patching is None or patching.places > 0 or patching.filled)


def count_silus(geometry: Geometry) -> int:
    """Number of SiLUs: gated MLPs have them, except behind patches that are placed by row and column."""
    patching = geometry.vision.patching if geometry.vision else None
    gelu = patching is not None and patching.filled
    return 0 if gelu else sum(it.name.endswith(".gate_proj") for it in geometry.linears)


def inline_bounds(graph: ir.Graph, context: LoweringContext) -> int:
    """Bounds of clipped linears, and what standardizes means of patches, become part of the graph, in float32."""
    ends = (".input_min", ".input_max", ".output_min", ".output_max", ".std_bias", ".std_scale")
    names = [name for name in graph.initializers if name.endswith(ends)]
    inline_vectors(graph, names, context)
    return len(names)


def store_positions(graph: ir.Graph, context: LoweringContext) -> int:
    """The table of positions in float32, where there is one."""
    table = graph.initializers.get(POSITIONS)
    if table is not None:
        replace_weight(table, initializer(graph, float_table(find_vector(table), "float32", context)))
    return int(table is not None)


def store_kernels(graph: ir.Graph, context: LoweringContext) -> int:
    """The kernels of convolutions in float32, their biases inline."""
    nodes = list(nodes_of(graph, "Conv"))
    for node in nodes:
        kernel, bias = (weight_value(value) for value in node.inputs[1:3] if value is not None)
        replace_weight(kernel, initializer(graph, float_table(find_vector(kernel), "float32", context)))
        inline_vectors(graph, [bias.name or ""], context)
    return len(nodes)
