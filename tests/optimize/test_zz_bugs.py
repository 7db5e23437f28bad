"""Tests that fail today. Run from the repository root with this file copied into tests/optimize/."""
import re
import onnx_ir as ir
import numpy as np
import pytest
from llmc.errors import BuildError, LlmcError, UsageError, CheckpointError
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.lower.plan import Float32, PerToken, WeightOnly
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid

LAYER = "model.layers.0"
CPU = capabilities("cpu")


@pytest.mark.parametrize("name", ["precision", "phases", "block_size", "max_context", "prefill_chunk"])
def test_a_zero_or_empty_value_is_refused_and_not_taken_for_nothing(name):
    value = "" if name in ("precision", "phases") else 0
    with pytest.raises(UsageError, match=name):
        resolve(Request(**{name: value}), CPU, 2048, "x")


def test_raise_linears_takes_no_matrix_that_is_not_transposed(exported, lowering):
    """o_proj is square here: x @ W and x @ W.T have the same shape."""
    lowered = lowering(exported("llama-biases").export)
    matmul = lowered.node(f"{LAYER}.self_attn.o_proj")
    matmul.replace_input_with(1, matmul.inputs[1].producer().inputs[0])
    try:
        times = lowered.apply("raise linears")
    except BuildError:
        return
    assert times == 14


def test_pack_projections_refuses_a_bias_that_only_some_of_the_three_have(exported, lowering):
    lowered = lowering(exported("llama-biases").export)
    add = lowered.node(f"{LAYER}.self_attn.k_proj.bias")
    add.outputs[0].replace_all_uses_with(add.inputs[0])
    lowered.graph.remove(add, safe=True)
    with pytest.raises(BuildError):
        lowered.apply("pack projections")


def test_defer_token_scales_leaves_a_projection_that_somebody_else_reads(exported, lowering):
    lowered = lowering(exported("mistral-window-wide-heads").export, PerToken()).before("defer token scales")
    up = lowered.node(f"{LAYER}.mlp.up_proj.Reshape")
    reader = ir.node("Identity", [up.outputs[0]])
    reader.outputs[0].name = reader.name = "reader"
    lowered.graph.append(reader)
    lowered.graph.outputs.append(reader.outputs[0])
    assert lowered.apply("defer token scales") == 1


def test_defer_token_scales_leaves_a_product_that_changes_before_it_is_quantized(exported, lowering):
    lowered = lowering(exported("mistral-window-wide-heads").export, PerToken()).before("defer token scales")
    lowered.node(f"{LAYER}.mlp.down_proj.input.Reshape").op_type = "Tanh"  # not a reshape any more
    assert lowered.apply("defer token scales") == 1


@pytest.mark.parametrize("weight", [1e-39, 1e-42, 1e20])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_of_extreme_weights_needs_no_warning(weight, bits):
    weights = np.array([[weight, -weight / 2] + [0] * 30], np.float32)
    q = rtn.quantize(weights, Grid(bits, 32))
    assert np.isfinite(q.dequantize()).all()
