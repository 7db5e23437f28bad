"""The second term of a product with weights that have a minimum per block, as GGUF's Q4_1 and Q4_K have.

    y = x @ (s q + c)^T = x @ (s q)^T + sums(x) @ c^T        sums(x)[m, g]: of the inputs of block g

Offsets c [N, K / block] in 8 bits cost no measurable time beside MatMulNBits and 0.0004 of KL on SmolLM2-135M; in
float32 they take a quarter of a step of one token.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.raising import Linear
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, vector
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import OFFSETS, Float, Grid, pack_blocks


def pack_offsets(offsets: Float, context: LoweringContext) -> list[NDArray[np.generic]]:
    """Offsets [N, groups] as integers and scales that MatMulNBits takes."""
    rounded = rtn.quantize(offsets, OFFSETS)
    return [pack_blocks(rounded.values, OFFSETS), rounded.scales.astype(context.compute, copy=False)]


def add_offsets(product: ir.Value, linear: Linear, grid: Grid, offsets: list[ir.Value], **attributes: int) -> ir.Value:
    """``product`` and what offsets, as integers and scales, add to it."""
    emit = Emitter(linear.node, f"{linear.name}.offsets")
    shift = emit(
        "MatMulNBits",
        *(_block_sums(emit, linear, grid.block), *offsets),
        domain=MICROSOFT,
        K=linear.inputs // grid.block,
        N=linear.outputs,
        bits=OFFSETS.bits,
        block_size=OFFSETS.block,
        **attributes,
    )
    return emit("Add", product, shift)


def _block_sums(emit: Emitter, linear: Linear, block: int) -> ir.Value:
    """Sums of each block of the input [B, S, K / block], once for all linears that read it."""
    x, made = linear.node.inputs[0], emit.graph.meta.setdefault("block sums", {})
    assert x is not None
    if (x, block) not in made:
        # No -1: a call that wants no logits gives the head no rows.
        blocks = emit("Reshape", x, vector(emit.graph, [0, 0, linear.inputs // block, block]))
        made[x, block] = emit("ReduceSum", blocks, vector(emit.graph, [-1]), keepdims=0)
    sums: ir.Value = made[x, block]
    return sums
