"""Mixtures of experts for ONNX Runtime on CPUs: its QMoE for integers, its MoE for floats.

Both choose by a softmax; of experts that score the same QMoE takes others than TopK does, and it normalizes weights
whatever it is told. So experts are chosen before them: they get the logarithms of these experts' weights, which they
normalize, and nothing of the others. Both want the rows of gate and up in turn, so no expert stays a reference to the
checkpoint.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.inventory import Experts
from llmc.optimize.lower.context import Float16, Float32, LoweringContext, WeightOnly
from llmc.optimize.lower.onnxruntime.recurrent import inline_vectors
from llmc.optimize.lower.raising import find_weight
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    emit_conversion,
    initializer,
    nodes_of,
    replace,
    scalar,
    vector,
)
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Float, Grid, Quantized, pack_blocks, pack_zero_points
from llmc.optimize.weights.store import grid_name
from llmc.optimize.weights.tensors import CodedTensor, Weight, in_parallel, sizes

# int8 arithmetic inside QMoE; with float activations a token of 4-bit experts takes three times as long.
ACCURACY_INT8 = 4
# The least block that the operator's kernels have.
LEAST_BLOCK = 16
# Logits of experts that were not chosen: their softmax is 0.
LEAST = float(np.finfo(np.float32).min)
# down(silu(gate x) * up x), gate and up in turn; weights of the chosen experts are normalized.
ATTRIBUTES = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
ATTRIBUTES["normalize_routing_weights"] = 1


def lower_experts(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Experts -> MoE or QMoE; the number of mixtures."""
    nodes = list(nodes_of(graph, "Experts", LLMC))
    listed = {item.name: item for item in context.geometry.mixtures}
    inline_vectors(graph, [f"{name}.correction" for name in listed], context)
    for node in nodes:
        item = listed[node.name or ""]
        logits, total = _emit_choice(node, item)
        match context.quant.stored(item.name):
            case Float32():
                output = _emit_floats(node, item, logits, "float32", context)
            case Float16():
                output = _emit_floats(node, item, logits, "float16", context)
            case WeightOnly(grid):
                output = _emit_integers(node, item, logits, fit_block(grid, item), context)
            case config:
                raise BuildError(
                    f"{item.name} is to be stored as {config}, which experts cannot; expected fp32, fp16, int8 or int4"
                )
        is_normalized = node.attributes["normalized"].as_int()
        replace(node, output if is_normalized else Emitter(node)("Mul", output, total))
    return len(nodes)


def _emit_choice(node: ir.Node, item: Experts) -> tuple[ir.Value, ir.Value]:
    """Logits [B * S, E], of which a softmax gives each chosen expert its share, and the sum [B, S, 1] of the chosen
    experts' weights."""
    emit, (scores, weights) = Emitter(node), node.inputs[1:3]
    chosen = emit.many("TopK", [scores, vector(emit.graph, [item.chosen])], 2, axis=-1)[1]
    picked = emit("GatherElements", weights, chosen, axis=-1)
    nothing = emit("Expand", scalar(emit.graph, LEAST, np.float32), emit("Shape", weights))
    logits = emit("ScatterElements", nothing, chosen, emit("Log", picked), axis=-1)
    total = emit("ReduceSum", picked, vector(emit.graph, [-1]), keepdims=1)
    return emit("Reshape", logits, vector(emit.graph, [-1, item.count])), total


def fit_block(grid: Grid, item: Experts) -> Grid:
    """The grid with a block that divides both widths of an expert, for the operator has one block for both."""
    block = min(grid.block or item.inner, *(size & -size for size in (item.inner, item.width)))
    if block < LEAST_BLOCK:
        raise BuildError(
            f"{item.name} has experts of {item.inner} x {item.width} values, and integers come in blocks of at least "
            f'{LEAST_BLOCK}; keep them in floats: layers = {{ "*.experts" = "fp32" }}'
        )
    return Grid(grid.bits, block, grid.symmetric)


def _emit_integers(node: ir.Node, item: Experts, logits: ir.Value, grid: Grid, context: LoweringContext) -> ir.Value:
    emit = Emitter(node, main="QMoE")
    stacks = [_pack(node, item, part, grid, context) for part in range(2)]
    (gate_up, gate_up_scales, *gate_up_zeros), (down, down_scales, *down_zeros) = (
        [initializer(emit.graph, tensor) for tensor in stack] for stack in stacks
    )
    return emit(
        "QMoE",
        *(node.inputs[0], logits, gate_up, gate_up_scales, None, down, down_scales, None, None, None, None),
        *(*gate_up_zeros, *down_zeros),
        domain=MICROSOFT,
        k=item.chosen,
        expert_weight_bits=grid.bits,
        block_size=grid.block,
        accuracy_level=ACCURACY_INT8,
        weights_prepacked=0,
        **ATTRIBUTES,
    )


def _pack(node: ir.Node, item: Experts, part: int, grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Codes uint8 [E, N, K * bits / 8], scales float32 [E, N, K / block] and, on an asymmetric grid, zero points: the
    checkpoint's own where they are on the grid, else the nearest."""
    tensor = find_weight(node.inputs[3 + part])

    def make() -> list[NDArray[np.generic]]:
        is_kept = isinstance(tensor, CodedTensor) and context.calibrated.keeps(tensor, grid)
        kept = context.calibrated.quantize_stacked([tensor], grid) if is_kept else None

        def pack_expert(expert: int) -> list[NDArray[np.generic]]:
            if kept is None:
                found = rtn.quantize(_read_expert(tensor, item, expert, part == 0, context), grid)
            else:
                rows = len(kept.values) // item.count
                found = _reorder(kept.rows(expert * rows, (expert + 1) * rows), _order(rows, part == 0))
            codes = pack_blocks(found.values, grid).reshape(len(found.values), -1)
            zeros = [] if found.zero_points is None else [pack_zero_points(found.zero_points, grid)]
            return [codes, found.scales, *zeros]

        experts = in_parallel(pack_expert, range(item.count))
        return [np.stack(arrays) for arrays in zip(*experts, strict=True)]

    name = f"{tensor.name}.experts.{grid_name(grid)}"
    return context.weights.add([name, f"{name}.scales", *([] if grid.symmetric else [f"{name}.zeros"])], make)


def _emit_floats(node: ir.Node, item: Experts, logits: ir.Value, dtype: str, context: LoweringContext) -> ir.Value:
    emit = Emitter(node, main="MoE")
    stacks = [_convert(emit, _store(node, item, part, dtype, context)) for part in range(2)]
    inputs = node.inputs[0], logits, stacks[0], None, stacks[1]
    return emit("MoE", *inputs, domain=MICROSOFT, k=item.chosen, **ATTRIBUTES)


def _store(node: ir.Node, item: Experts, part: int, dtype: str, context: LoweringContext) -> ir.ExternalTensor:
    tensor = find_weight(node.inputs[3 + part])

    def make() -> list[NDArray[np.generic]]:
        experts = [_read_expert(tensor, item, expert, part == 0, context) for expert in range(item.count)]
        return [np.stack(experts).astype(dtype, copy=False)]

    return context.weights.add([f"{tensor.name}.experts.{dtype}"], make)[0]


def _convert(emit: Emitter, tensor: ir.ExternalTensor) -> ir.Value:
    return emit_conversion(emit, initializer(emit.graph, tensor), tensor.dtype, ir.DataType.FLOAT)


def _read_expert(tensor: Weight, item: Experts, expert: int, in_turn: bool, context: LoweringContext) -> Float:
    """One expert's matrix, float32 [N, K]; of gate and up the rows ``in_turn`` instead of one behind the other."""
    rows = sizes(tensor)[0] // item.count  # 1, or of integers those of a matrix
    read: Float = context.calibrated.rows(tensor, expert * rows, (expert + 1) * rows)
    matrix = read.reshape(-1, read.shape[-1])
    return matrix[_order(len(matrix), in_turn)]


def _order(rows: int, in_turn: bool) -> NDArray[np.int64]:
    return np.arange(rows).reshape(2, -1).T.ravel() if in_turn else np.arange(rows)


def _reorder(found: Quantized, order: NDArray[np.int64]) -> Quantized:
    zeros = None if found.zero_points is None else found.zero_points[order]
    return Quantized(found.values[order], found.scales[order], found.grid, zeros)
