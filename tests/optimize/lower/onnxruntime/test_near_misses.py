"""What only looks like a pass's pattern, a weight or a value is left alone or refused, never taken for it."""

import onnx_ir as ir
import pytest

from llmc.errors import BuildError
from llmc.optimize.lower.context import PerToken

BIASES, UNTIED = "llama-biases", "mistral-window-wide-heads"
LAYER = "model.layers.0"


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
