"""What only looks like a pass's pattern, a weight or a value is left alone or refused, never taken for it."""

import numpy as np
import onnx_ir as ir
import pytest

from llmc.errors import BuildError, UsageError
from llmc.optimize.lower.context import PerToken
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities

BIASES, UNTIED = "llama-biases", "mistral-window-wide-heads"
LAYER = "model.layers.0"


@pytest.mark.parametrize("name", ["precision", "head", "phases", "block_size", "max_context", "prefill_chunk"])
def test_a_zero_or_empty_value_is_refused_and_not_taken_for_none(name):
    value = "" if name in ("precision", "head", "phases") else 0
    with pytest.raises(UsageError, match=name):
        resolve(Request(**{name: value}), capabilities("cpu"), 2048, "x")


def test_a_context_without_room_for_a_prompt_and_a_token_is_refused():
    with pytest.raises(UsageError, match="max_context is 1, expected 2"):
        resolve(Request(max_context=1), capabilities("cpu"), 2048, "x")


def test_raise_linears_leaves_a_matrix_that_is_not_transposed(exported, lowering):
    """o_proj is square here: x @ W and x @ W.T have the same shape."""
    lowered = lowering(exported(BIASES).export)
    matmul = lowered.node(f"{LAYER}.self_attn.o_proj")
    matmul.replace_input_with(1, matmul.inputs[1].producer().inputs[0])
    assert lowered.apply("raise linears") == 14


def test_pack_projections_refuses_a_bias_that_only_some_of_the_three_have(exported, lowering):
    lowered = lowering(exported(BIASES).export)
    add = lowered.node(f"{LAYER}.self_attn.k_proj.bias")
    add.outputs[0].replace_all_uses_with(add.inputs[0])
    lowered.graph.remove(add, safe=True)
    with pytest.raises(BuildError, match=f"{LAYER}.self_attn: only some of query, key and value have a bias"):
        lowered.apply("pack projections")


def test_defer_token_scales_leaves_a_projection_that_somebody_else_reads(exported, lowering):
    lowered = lowering(exported(UNTIED).export, PerToken()).before("defer token scales")
    up = lowered.node(f"{LAYER}.mlp.up_proj.Reshape")
    reader = ir.node("Identity", [up.outputs[0]])
    reader.outputs[0].name = reader.name = "reader"
    lowered.graph.append(reader)
    lowered.graph.outputs.append(reader.outputs[0])
    assert lowered.apply("defer token scales") == 1


def test_defer_token_scales_leaves_a_product_that_changes_before_it_is_quantized(exported, lowering):
    lowered = lowering(exported(UNTIED).export, PerToken()).before("defer token scales")
    lowered.node(f"{LAYER}.mlp.down_proj.input.Reshape").op_type = "Tanh"
    assert lowered.apply("defer token scales") == 1


@pytest.mark.parametrize("exponent", [-120, -60, -41, 41, 60, 120])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_any_magnitude_are_quantized_alike(exponent, bits):
    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32) ** 3
    usual = rtn.quantize(weights, Grid(bits, 32))
    scaled = rtn.quantize(np.ldexp(weights, exponent), Grid(bits, 32))
    np.testing.assert_array_equal(scaled.values, usual.values)
    np.testing.assert_array_equal(scaled.scales, np.ldexp(usual.scales, exponent))


@pytest.mark.parametrize("weight", [1e-45, 1e-40, 3.4e38])
def test_the_smallest_and_largest_weights_stay_finite(weight):
    weights = np.array([[weight, -weight / 2] + [0] * 30], np.float32)
    assert np.isfinite(rtn.quantize(weights, Grid(4, 32)).dequantize()).all()
