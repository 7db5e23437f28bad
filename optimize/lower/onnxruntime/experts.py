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
from llmc.optimize.lower.raising import find_vector
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
from llmc.optimize.quantize.grid import Float, Grid, pack_blocks, pack_zero_points
from llmc.optimize.weights.store import grid_name
from llmc.optimize.weights.tensors import in_parallel

# int8 arithmetic inside QMoE; with float activations a token of 4-bit experts takes three times as long.
ACCURACY_INT8 = 4
# Those of a node whose experts have no biases and silu.
PLAIN_INPUTS = 5
# The least block that the operator's kernels have.
LEAST_BLOCK = 16
# Logits of experts that were not chosen: their softmax is 0.
LEAST = float(np.finfo(np.float32).min)
# down(silu(gate x) * up x), gate and up in turn; weights of the chosen experts are normalized.
ATTRIBUTES = {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
# As of a clamped activation, up, plus one.
PLAIN = {"activation_alpha": 1.0, "activation_beta": 0.0}


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
    stacks, biases = [_pack(node, part, grid, context) for part in range(2)], _emit_biases(node, context)
    (gate_up, gate_up_scales, *gate_up_zeros), (down, down_scales, *down_zeros) = (
        [initializer(emit.graph, tensor) for tensor in stack] for stack in stacks
    )
    return emit(
        "QMoE",
        *(node.inputs[0], logits, gate_up, gate_up_scales, biases[0], down, down_scales, biases[1], None, None, None),
        *(*gate_up_zeros, *down_zeros),
        domain=MICROSOFT,
        k=item.chosen,
        expert_weight_bits=grid.bits,
        block_size=grid.block,
        accuracy_level=ACCURACY_INT8,
        weights_prepacked=0,
        **_list_attributes(node),
    )


def _pack(node: ir.Node, part: int, grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Codes uint8 [E, N, K * bits / 8], scales float32 [E, N, K / block] and, on an asymmetric grid, zero points."""
    tensor, in_turn = find_vector(node.inputs[3 + part]), _puts_in_turn(node, part)

    def make() -> list[NDArray[np.generic]]:
        def pack_expert(expert: int) -> list[NDArray[np.generic]]:
            found = rtn.quantize(_read_expert(tensor, expert, in_turn, context), grid)
            codes = pack_blocks(found.values, grid).reshape(len(found.values), -1)
            zeros = [] if found.zero_points is None else [pack_zero_points(found.zero_points, grid)]
            return [codes, found.scales, *zeros]

        experts = in_parallel(pack_expert, range(_count(tensor)))
        return [np.stack(arrays) for arrays in zip(*experts, strict=True)]

    name = f"{tensor.name}.experts.{grid_name(grid)}"
    return context.weights.add([name, f"{name}.scales", *([] if grid.symmetric else [f"{name}.zeros"])], make)


def _emit_floats(node: ir.Node, item: Experts, logits: ir.Value, dtype: str, context: LoweringContext) -> ir.Value:
    emit = Emitter(node, main="MoE")
    stacks = [_convert(emit, _store(node, part, dtype, context)) for part in range(2)]
    biases = _emit_biases(node, context)
    inputs = node.inputs[0], logits, stacks[0], biases[0], stacks[1], biases[1]
    return emit("MoE", *inputs, domain=MICROSOFT, k=item.chosen, **_list_attributes(node))


def _emit_biases(node: ir.Node, context: LoweringContext) -> list[ir.Value | None]:
    """Biases [E, N] of both parts in float32, None where experts have none."""
    tensors = [find_vector(value) for value in node.inputs[5:7]]
    made = [context.weights.add([f"{it.name}.float32"], lambda it=it: [context.calibrated.rows(it)]) for it in tensors]
    assert node.graph is not None
    return [initializer(node.graph, tensor) for [tensor] in made] or [None, None]


def _list_attributes(node: ir.Node) -> dict[str, str | int | float]:
    if len(node.inputs) == PLAIN_INPUTS:
        return {**ATTRIBUTES, **PLAIN}
    alpha, limit = (node.attributes[name].as_float() for name in ("alpha", "limit"))
    return {**ATTRIBUTES, "activation_alpha": alpha, "activation_beta": 1.0, "swiglu_limit": limit}


def _puts_in_turn(node: ir.Node, part: int) -> bool:
    """True for the rows of gate and up that lie behind each other."""
    return part == 0 and len(node.inputs) == PLAIN_INPUTS


def _store(node: ir.Node, part: int, dtype: str, context: LoweringContext) -> ir.ExternalTensor:
    tensor, in_turn = find_vector(node.inputs[3 + part]), _puts_in_turn(node, part)

    def make() -> list[NDArray[np.generic]]:
        experts = [_read_expert(tensor, expert, in_turn, context) for expert in range(_count(tensor))]
        return [np.stack(experts).astype(dtype, copy=False)]

    return context.weights.add([f"{tensor.name}.experts.{dtype}"], make)[0]


def _convert(emit: Emitter, tensor: ir.ExternalTensor) -> ir.Value:
    return emit_conversion(emit, initializer(emit.graph, tensor), tensor.dtype, ir.DataType.FLOAT)


def _read_expert(tensor: ir.ExternalTensor, expert: int, in_turn: bool, context: LoweringContext) -> Float:
    """One expert's matrix, float32 [N, K]; of gate and up the rows ``in_turn`` instead of one behind the other."""
    matrix: Float = context.calibrated.rows(tensor, expert, expert + 1)[0]
    return matrix.reshape(2, -1, matrix.shape[1]).swapaxes(0, 1).reshape(matrix.shape) if in_turn else matrix


def _count(tensor: ir.ExternalTensor) -> int:
    return int(tensor.shape.numpy()[0])
