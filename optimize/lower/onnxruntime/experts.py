"""Mixtures of experts for ONNX Runtime on CPUs: its QMoE for integers, its MoE for floats.

QMoE chooses by ``router_probs`` and weighs by ``router_weights``; without these it normalizes weights whatever it is
told. MoE knows a softmax alone, so it gets the logarithms of the weights of the experts that are chosen already, and
none of the others. Both want the rows of gate and up in turn, so no expert stays a reference to the checkpoint.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import BuildError
from llmc.inventory import Experts
from llmc.optimize.lower.context import Float16, Float32, LoweringContext, WeightOnly
from llmc.optimize.lower.onnxruntime.recurrent import inline_vectors
from llmc.optimize.lower.raising import find_vector
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    constant,
    emit_conversion,
    initializer,
    nodes_of,
    replace,
    vector,
)
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Float, Grid, pack_blocks, pack_zero_points
from llmc.optimize.weights.store import grid_name
from llmc.optimize.weights.tensors import in_parallel

# int8 arithmetic inside QMoE; with float activations a token of 4-bit experts takes three times as long.
ACCURACY_INT8 = 4
# The least block that the operator's kernels have.
LEAST_BLOCK = 16
# down(silu(gate x) * up x), gate and up in turn.
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}


def lower_experts(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Experts -> MoE or QMoE; the number of mixtures."""
    nodes = list(nodes_of(graph, "Experts", LLMC))
    listed = {item.name: item for item in context.geometry.mixtures}
    inline_vectors(graph, [f"{name}.correction" for name in listed], context)
    for node in nodes:
        item = listed[node.name or ""]
        match context.quant.stored(item.name):
            case Float32():
                output = _emit_floats(node, item, "float32", context)
            case Float16():
                output = _emit_floats(node, item, "float16", context)
            case WeightOnly(grid):
                output = _emit_integers(node, item, fit_block(grid, item), context)
            case config:
                raise BuildError(
                    f"{item.name} is to be stored as {config}, which experts cannot; expected fp32, fp16, int8 or int4"
                )
        replace(node, output)
    return len(nodes)


def fit_block(grid: Grid, item: Experts) -> Grid:
    """The grid with a block that divides both widths of an expert, for the operator has one block for both."""
    block = min(grid.block or item.inner, *(size & -size for size in (item.inner, item.width)))
    if block < LEAST_BLOCK:
        raise BuildError(
            f"{item.name} has experts of {item.inner} x {item.width} values, and integers come in blocks of at least "
            f'{LEAST_BLOCK}; keep them in floats: layers = {{ "*.experts" = "fp32" }}'
        )
    return Grid(grid.bits, block, grid.symmetric)


def _emit_integers(node: ir.Node, item: Experts, grid: Grid, context: LoweringContext) -> ir.Value:
    emit = Emitter(node, main="QMoE")
    x, scores, weights = node.inputs[:3]
    stacks = [_pack(node, part, grid, context) for part in range(2)]
    (gate_up, gate_up_scales, *gate_up_zeros), (down, down_scales, *down_zeros) = (
        [initializer(emit.graph, tensor) for tensor in stack] for stack in stacks
    )
    zeros: list[ir.Value | None] = [*gate_up_zeros, *down_zeros] or [None, None]
    return emit(
        "QMoE",
        *(x, _rows(emit, scores, item), gate_up, gate_up_scales, None, down, down_scales, None, None, None, None),
        *(*zeros, None, _rows(emit, weights, item)),
        domain=MICROSOFT,
        k=item.chosen,
        normalize_routing_weights=_is_normalized(node),
        expert_weight_bits=grid.bits,
        block_size=grid.block,
        accuracy_level=ACCURACY_INT8,
        weights_prepacked=0,
        **SWIGLU,
    )


def _pack(node: ir.Node, part: int, grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Codes uint8 [E, N, K * bits / 8], scales float32 [E, N, K / block] and, on an asymmetric grid, zero points."""
    tensor = find_vector(node.inputs[3 + part])

    def make() -> list[NDArray[np.generic]]:
        def pack_expert(expert: int) -> list[NDArray[np.generic]]:
            found = rtn.quantize(_read_expert(tensor, expert, part == 0, context), grid)
            packed = [pack_blocks(found.values, grid).reshape(len(found.values), -1), found.scales]
            return packed if found.zero_points is None else [*packed, pack_zero_points(found.zero_points, grid)]

        experts = in_parallel(pack_expert, range(_count(tensor)))
        return [np.stack(arrays) for arrays in zip(*experts, strict=True)]

    name = f"{tensor.name}.experts.{grid_name(grid)}"
    return context.weights.add([name, f"{name}.scales", *([] if grid.symmetric else [f"{name}.zeros"])], make)


def _emit_floats(node: ir.Node, item: Experts, dtype: str, context: LoweringContext) -> ir.Value:
    emit, last = Emitter(node, main="MoE"), vector(node.graph, [-1])  # type: ignore[arg-type]
    x, scores, weights = node.inputs[:3]
    chosen = emit.many("TopK", [scores, vector(emit.graph, [item.chosen])], 2, axis=-1)[1]
    picked = emit("GatherElements", weights, chosen, axis=-1)
    least = constant(emit.graph, "const.least", np.array(np.finfo(np.float32).min))
    nothing = emit("Expand", least, emit("Shape", weights))
    logits = emit("ScatterElements", nothing, chosen, emit("Log", picked), axis=-1)
    stacks = [_convert(emit, _store(node, part, dtype, context), dtype) for part in range(2)]
    product = emit(
        "MoE",
        *(x, _rows(emit, logits, item), stacks[0], None, stacks[1]),
        domain=MICROSOFT,
        k=item.chosen,
        normalize_routing_weights=1,
        **SWIGLU,
    )
    return product if _is_normalized(node) else emit("Mul", product, emit("ReduceSum", picked, last, keepdims=1))


def _store(node: ir.Node, part: int, dtype: str, context: LoweringContext) -> ir.ExternalTensor:
    tensor = find_vector(node.inputs[3 + part])

    def make() -> list[NDArray[np.generic]]:
        experts = [_read_expert(tensor, expert, part == 0, context) for expert in range(_count(tensor))]
        return [np.stack(experts).astype(dtype, copy=False)]

    return context.weights.add([f"{tensor.name}.experts.{dtype}"], make)[0]


def _convert(emit: Emitter, tensor: ir.ExternalTensor, dtype: str) -> ir.Value:
    return emit_conversion(emit, initializer(emit.graph, tensor), tensor.dtype, ir.DataType.FLOAT)


def _read_expert(tensor: ir.ExternalTensor, expert: int, in_turn: bool, context: LoweringContext) -> Float:
    """One expert's matrix, float32 [N, K]; of gate and up the rows ``in_turn`` instead of one behind the other."""
    (matrix,) = context.calibrated.rows(tensor, expert, expert + 1)
    return (
        np.ascontiguousarray(matrix.reshape(2, -1, matrix.shape[1]).swapaxes(0, 1)).reshape(matrix.shape)
        if in_turn
        else matrix
    )


def _count(tensor: ir.ExternalTensor) -> int:
    return int(tensor.shape.numpy()[0])


def _rows(emit: Emitter, values: ir.Value | None, item: Experts) -> ir.Value:
    """Values of each token for each expert [B, S, E] -> [B * S, E]."""
    return emit("Reshape", values, vector(emit.graph, [-1, item.count]))


def _is_normalized(node: ir.Node) -> int:
    return node.attributes["normalized"].as_int()
