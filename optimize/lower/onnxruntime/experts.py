"""Mixtures of experts for ONNX Runtime on CPUs: its QMoE for integers, its MoE for floats.

Both choose by a softmax. On ties QMoE chooses other experts than TopK, and it always normalizes weights. So experts are
chosen before: both operators get the logarithms of the chosen experts' weights, and the least float for the others.
Both want the rows of gate and up in turn. QMoE takes MXFP4 as checkpoints store it, computes with floats, and reads
only the chosen experts of the mapped file. Neither has gelu: each such expert is a product of the rows that chose it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.experts import Experts
from llmc.errors import BuildError
from llmc.exported import CodedTensor, Mxfp4Stack, Weight, in_parallel, sizes
from llmc.optimize.lower.context import Float16, Float32, LoweringContext, Mxfp4, QuantConfig, WeightOnly
from llmc.optimize.lower.linears import inline_vectors
from llmc.optimize.lower.raising import find_vector, find_weight
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    constant,
    initializer,
    nodes_of,
    replace,
    scalar,
    vector,
)
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Float, Grid, pack_blocks, pack_rows
from llmc.optimize.weights.store import grid_name

# int8 arithmetic inside QMoE; with float activations a token of 4-bit experts takes three times as long.
ACCURACY_INT8 = 4
# Inputs of a node whose experts have no biases and silu; of any other, where the scales of MXFP4 begin.
PLAIN_INPUTS, SCALES = 5, 7
# The least block that the operator's kernels have.
LEAST_BLOCK = 16
# Logits of experts that were not chosen: their softmax is 0.
LEAST = float(np.finfo(np.float32).min)
# down(silu(gate x) * up x), gate and up in turn; weights of the chosen experts are normalized.
ATTRIBUTES = {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
PLAIN = {"activation_alpha": 1.0, "activation_beta": 0.0}
# Row by row, as checkpoints have it.
MXFP4: dict[str, Any] = {"quant_type": "fp4", "expert_weight_bits": 4, "block_size": 32, "weights_prepacked": 1}


def lower_experts(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::Experts -> MoE, QMoE or products of each expert; the number of mixtures."""
    nodes = list(nodes_of(graph, "Experts", LLMC))
    listed = {item.name: item for item in context.geometry.mixtures}
    inline_vectors(graph, [f"{name}.{it}" for name in listed for it in ("correction", "per_expert_scale")], context)
    for node in nodes:
        item = listed.get(node.name or "")
        if item is None:
            raise BuildError(f"{node.name} is not in the manifest's list of mixtures; export the checkpoint again")
        if item.activation == "gelu_tanh":
            replace(node, _emit_products(node, item, context))
            continue
        logits, total = _emit_choice(node, item)
        match context.quant.stored(item.name):
            case Float32():
                output = _emit_floats(node, item, logits, "float32", context)
            case Float16():
                output = _emit_floats(node, item, logits, "float16", context)
            case Mxfp4() if item.codes:
                output = _emit_mxfp4(node, item, logits, context)
            case WeightOnly(grid):
                output = _emit_integers(node, item, logits, fit_block(grid, item), context)
            case config:
                raise _refuse(item, config)
        is_normalized = node.attributes["normalized"].as_int()
        replace(node, output if is_normalized else Emitter(node)("Mul", output, total))
    return len(nodes)


def _emit_products(node: ir.Node, item: Experts, context: LoweringContext) -> ir.Value:
    """Multiply the pairs of a token and a chosen expert, sorted by expert; an expert may have none."""
    emit, x = Emitter(node), node.inputs[0]
    graph, end = emit.graph, vector(emit.graph, [-1])
    chosen, picked = _choose(emit, node, item)
    if node.attributes["normalized"].as_int():
        picked = emit("Div", picked, emit("ReduceSum", picked, end, keepdims=1))
    pairs = emit("Reshape", chosen, end)
    every, size = emit("Shape", pairs), vector(graph, [-1, item.width])
    experts = constant(graph, f"const.experts.{item.count}", np.arange(item.count)[:, None])
    hits = emit("Cast", emit("Equal", pairs, experts), to=ir.DataType.INT64)
    counts = emit("ReduceSum", hits, end, keepdims=0)
    order = emit.many("TopK", [pairs, every], 2, axis=-1, largest=0)[1]
    tokens = emit("Div", order, scalar(graph, item.chosen, np.int64))
    both = _emit_product(node, item, 0, emit("Gather", emit("Reshape", x, size), tokens), counts, context)
    gate, up = emit.many("Split", [both], 2, axis=-1, num_outputs=2)
    inner = emit("Mul", emit("Gelu", gate, approximate="tanh"), up)
    made = _emit_product(node, item, 1, inner, counts, context)
    places = emit.many("TopK", [order, every], 2, axis=-1, largest=0)[1]
    by_token = emit("Reshape", emit("Gather", made, places), vector(graph, [-1, item.chosen, item.width]))
    factors = emit("Reshape", picked, vector(graph, [-1, 1, item.chosen]))
    return emit("Reshape", emit("MatMul", factors, by_token), emit("Shape", x))


def _emit_product(
    node: ir.Node, item: Experts, part: int, rows: ir.Value, counts: ir.Value, context: LoweringContext
) -> ir.Value:
    """Rows [P, K], the first ``counts[0]`` of them of the first expert -> [P, N]."""
    stack, linear = _Stack.of(node, item, part), item.parts[part]
    emit = Emitter(node, linear.name)
    runs = emit.many("Split", [rows, counts], item.count, axis=0)
    match context.quant.stored(item.name):
        case WeightOnly(grid):
            grid = fit_block(grid, item)
            groups = linear.inputs // grid.block
            numbers: dict[str, Any] = {"K": linear.inputs, "N": linear.outputs}
            numbers |= {"bits": grid.bits, "block_size": grid.block, "accuracy_level": ACCURACY_INT8}
            shapes = [[linear.outputs, groups, grid.block * grid.bits // 8], [linear.outputs, groups]]
            shapes += [] if grid.symmetric else [[linear.outputs, -(-groups * grid.bits // 8)]]
            stored = list(zip(_pack(stack, grid, context), shapes, strict=True))
            operator = partial(emit, "MatMulNBits", **numbers)
        case Float32() | Float16() as kind:
            dtype = "float32" if isinstance(kind, Float32) else "float16"
            stored = [(_store(stack, dtype, context), [linear.outputs, linear.inputs])]
            operator = partial(emit, "FusedMatMul", transB=1)
        case config:
            raise _refuse(item, config)
    products = []
    for expert, run in enumerate(runs):
        own = [_convert(emit, context.weights.view(tensor, shape, expert)) for tensor, shape in stored]
        products.append(operator(run, *own, domain=MICROSOFT))
    return emit("Concat", *products, axis=0)


def _emit_choice(node: ir.Node, item: Experts) -> tuple[ir.Value, ir.Value]:
    """Logits [B * S, E], of which a softmax gives each chosen expert its share, and the sum [B, S, 1] of the chosen
    experts' weights."""
    emit = Emitter(node)
    chosen, picked = _choose(emit, node, item)
    nothing = emit("Expand", scalar(emit.graph, LEAST, np.float32), emit("Shape", node.inputs[2]))
    logits = emit("ScatterElements", nothing, chosen, emit("Log", picked), axis=-1)
    total = emit("ReduceSum", picked, vector(emit.graph, [-1]), keepdims=1)
    return emit("Reshape", logits, vector(emit.graph, [-1, item.count])), total


def _choose(emit: Emitter, node: ir.Node, item: Experts) -> tuple[ir.Value, ir.Value]:
    """The experts with the highest scores, the first of equal ones, and their weights [B, S, chosen]."""
    chosen = emit.many("TopK", [node.inputs[1], vector(emit.graph, [item.chosen])], 2, axis=-1)[1]
    return chosen, emit("GatherElements", node.inputs[2], chosen, axis=-1)


def _refuse(item: Experts, config: QuantConfig) -> BuildError:
    return BuildError(
        f"{item.name} is to be stored as {config}, which experts cannot; expected fp32, fp16, int8 or int4"
    )


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
    packed = [_pack(_Stack.of(node, item, part), grid, context) for part in range(2)]
    numbers = {"expert_weight_bits": grid.bits, "block_size": grid.block, "accuracy_level": ACCURACY_INT8}
    attributes = {**numbers, "weights_prepacked": 0}
    return _emit_qmoe(node, item, logits, packed, context, [it for _, _, *zeros in packed for it in zeros], attributes)


def _emit_mxfp4(node: ir.Node, item: Experts, logits: ir.Value, context: LoweringContext) -> ir.Value:
    """The checkpoint's own bytes, which the kernel reads where the file is mapped."""
    kept = [_keep(_Stack.of(node, item, part), context) for part in range(2)]
    [ones] = context.weights.add([f"const.ones.{item.count}"], lambda: [np.ones(item.count, np.float32)])
    return _emit_qmoe(node, item, logits, kept, context, [None] * 4 + [ones, ones], MXFP4)


def _emit_qmoe(
    node: ir.Node,
    item: Experts,
    logits: ir.Value,
    stacks: Sequence[Sequence[ir.ExternalTensor]],
    context: LoweringContext,
    more: Sequence[ir.ExternalTensor | None],
    attributes: Mapping[str, Any],
) -> ir.Value:
    """QMoE on codes and scales of gate_up and down; ``more`` are its inputs after the third stack, which is empty."""
    emit, biases = Emitter(node, main="QMoE"), _store_biases(node, context)
    given = [
        tensor for (codes, scales, *_), bias in zip(stacks, biases, strict=True) for tensor in (codes, scales, bias)
    ]
    tensors = [*given, None, None, None, *more]
    values = [None if tensor is None else initializer(emit.graph, tensor) for tensor in tensors]
    knobs = {**attributes, **_list_attributes(node)}
    return emit("QMoE", node.inputs[0], logits, *values, domain=MICROSOFT, k=item.chosen, **knobs)


@dataclass(frozen=True)
class _Stack:
    """Weights [E, N, K] of one product of all experts; ``in_turn`` interleaves the rows of gate and up."""

    tensor: Weight | Mxfp4Stack
    name: str
    count: int
    in_turn: bool

    @classmethod
    def of(cls, node: ir.Node, item: Experts, part: int) -> "_Stack":
        stored, scales = find_weight(node.inputs[3 + part]), node.inputs[SCALES + part : SCALES + part + 1]
        tensor = Mxfp4Stack(find_vector(node.inputs[3 + part]), find_vector(scales[0])) if scales else stored
        in_turn = part == 0 and len(node.inputs) == PLAIN_INPUTS and item.activation == "silu"
        return cls(tensor, f"{stored.name}.experts", item.count, in_turn)

    @property
    def weight(self) -> str:
        """Its name in the checkpoint."""
        return self.name.removesuffix(".experts")

    def read(self, expert: int, context: LoweringContext) -> Float:
        """One expert's matrix, float32 [N, K], of gate and up with the rows in turn."""
        if isinstance(self.tensor, Mxfp4Stack):
            own: Float = self.tensor.matrices(expert, expert + 1)[0]
            return own
        rows = sizes(self.tensor)[0] // self.count  # 1, or of integers those of a matrix
        read: Float = context.calibrated.rows(self.tensor, expert * rows, (expert + 1) * rows)
        matrix = read.reshape(-1, read.shape[-1])
        return matrix[self.order(len(matrix))]

    def order(self, rows: int) -> NDArray[np.int64]:
        """Places that the rows of one expert's matrix are read from."""
        return np.arange(rows).reshape(2, -1).T.ravel() if self.in_turn else np.arange(rows)


def _pack(stack: _Stack, grid: Grid, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Codes uint8 [E, N, K * bits / 8], scales float32 [E, N, K / block] and, on an asymmetric grid, zero points: the
    checkpoint's own where they are on the grid, else those that calibration chose, or else the nearest."""
    tensor = stack.tensor

    def make() -> list[NDArray[np.generic]]:
        kept = context.calibrated.chosen(stack.weight, grid)
        if isinstance(tensor, CodedTensor) and context.calibrated.keeps(tensor, grid):
            kept = context.calibrated.quantize_stacked([tensor], grid)

        def pack_expert(expert: int) -> list[NDArray[np.generic]]:
            if kept is None:
                quantized = rtn.quantize(stack.read(expert, context), grid)
            else:
                rows = len(kept.values) // stack.count
                quantized = kept.rows(expert * rows + stack.order(rows))
            codes = pack_blocks(quantized.values, grid).reshape(len(quantized.values), -1)
            zeros = [] if quantized.zero_points is None else [pack_rows(quantized.zero_points, grid)]
            return [codes, quantized.scales, *zeros]

        experts = in_parallel(pack_expert, range(stack.count))
        return [np.stack(arrays) for arrays in zip(*experts, strict=True)]

    name = f"{stack.name}.{grid_name(grid)}"
    return context.weights.add([name, f"{name}.scales", *([] if grid.symmetric else [f"{name}.zeros"])], make)


def _keep(stack: _Stack, context: LoweringContext) -> list[ir.ExternalTensor]:
    """Codes uint8 [E, N, K / 2] and scales float8 (e8m0) [E, N, K / 32], as they are."""
    stored = stack.tensor
    assert isinstance(stored, Mxfp4Stack)

    def make() -> list[NDArray[np.generic]]:
        return [stored.read(stored.codes), stored.read(stored.scales).view(ml_dtypes.float8_e8m0fnu)]

    return context.weights.add([f"{stack.name}.mxfp4", f"{stack.name}.mxfp4.scales"], make)


def _emit_floats(node: ir.Node, item: Experts, logits: ir.Value, dtype: str, context: LoweringContext) -> ir.Value:
    emit, biases = Emitter(node, main="MoE"), _store_biases(node, context)
    stacks = [_convert(emit, _store(_Stack.of(node, item, part), dtype, context)) for part in range(2)]
    added = [None if tensor is None else initializer(emit.graph, tensor) for tensor in biases]
    inputs = node.inputs[0], logits, stacks[0], added[0], stacks[1], added[1]
    return emit("MoE", *inputs, domain=MICROSOFT, k=item.chosen, **_list_attributes(node))


def _store(stack: _Stack, dtype: str, context: LoweringContext) -> ir.ExternalTensor:
    def make() -> list[NDArray[np.generic]]:
        experts = [stack.read(expert, context) for expert in range(stack.count)]
        return [np.stack(experts).astype(dtype, copy=False)]

    return context.weights.add([f"{stack.name}.{dtype}"], make)[0]


def _convert(emit: Emitter, tensor: ir.ExternalTensor) -> ir.Value:
    """Convert float16 to float32; leave other types as they are."""
    value = initializer(emit.graph, tensor)
    return emit("Cast", value, to=ir.DataType.FLOAT) if tensor.dtype == ir.DataType.FLOAT16 else value


def _store_biases(node: ir.Node, context: LoweringContext) -> list[ir.ExternalTensor | None]:
    """Biases [E, N] of both products in float32, None where experts have none."""
    if len(node.inputs) == PLAIN_INPUTS:
        return [None, None]

    def store(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
        return context.weights.add([f"{tensor.name}.float32"], lambda: [context.calibrated.rows(tensor)])[0]

    return [store(find_vector(value)) for value in node.inputs[PLAIN_INPUTS:SCALES]]


def _list_attributes(node: ir.Node) -> dict[str, Any]:
    if len(node.inputs) == PLAIN_INPUTS:
        return {**ATTRIBUTES, **PLAIN}
    alpha, limit = (node.attributes[name].as_float() for name in ("alpha", "limit"))
    return {**ATTRIBUTES, "activation_alpha": alpha, "activation_beta": 1.0, "swiglu_limit": limit}
