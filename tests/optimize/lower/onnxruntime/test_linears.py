"""Linears and the embedding become what their form says; and a pass that misses its mark is named."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import varied

from llmc.errors import BuildError
from llmc.optimize import passes
from llmc.optimize.lower.context import Computed, Float32, PerToken, WeightOnly
from llmc.optimize.quantize.grid import Grid

BIASES, UNTIED, TIED = "llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded"
LAYER = "model.layers.0"
BLOCKS = WeightOnly(Grid(4, 32))


def operators(lowered) -> dict[str, int]:
    types = [node.op_type for node in lowered.graph]
    return {op_type: types.count(op_type) for op_type in types}


@pytest.mark.parametrize(
    ("form", "head", "operator"),
    [
        (Float32(), Float32(), "FusedMatMul"),
        (WeightOnly(Grid(8, 32)), WeightOnly(Grid(8, 32)), "MatMulNBits"),
        (BLOCKS, BLOCKS, "MatMulNBits"),
        (PerToken(), BLOCKS, "MatMulIntegerToFloat"),
    ],
)
def test_lower_linears_uses_the_operator_of_the_form(exported, lowering, form, head, operator):
    lowered = lowering(exported(BIASES).export, form, head)
    assert lowered.apply("lower linears") == 15  # parts of packed ones count
    found = operators(lowered)
    assert "Linear" not in found
    assert found[operator] == (10 if isinstance(form, PerToken) else 11)
    assert lowered.graph.outputs[0].producer().op_type == {"MatMulIntegerToFloat": "MatMulNBits"}.get(
        operator, operator
    )


@pytest.mark.parametrize("form", [WeightOnly(Grid(8, 128)), BLOCKS, PerToken()])
def test_every_blocked_linear_asks_for_integer_arithmetic(exported, lowering, form):
    lowered = lowering(exported(BIASES).export, form)
    lowered.apply("lower linears")
    assert lowered.nodes("MatMulNBits")
    assert {node.attributes["accuracy_level"].as_int() for node in lowered.nodes("MatMulNBits")} == {4}


def test_linears_that_read_the_same_activation_quantize_it_once(exported, lowering):
    lowered = lowering(exported(UNTIED).export, PerToken())
    lowered.apply("lower linears")
    # qkv_proj, o_proj, gate_proj together with up_proj, down_proj
    assert operators(lowered)["QuantizeLinear"] == 4 * 2
    gate, up = (lowered.node(f"{LAYER}.mlp.{name}_proj.MatMulIntegerToFloat") for name in ("gate", "up"))
    assert gate.inputs[0] is up.inputs[0]


def test_unsigned_weights_compute_the_bits_of_signed_ones(exported, lowering, decoder, ids):
    """A CPU without VNNI would convert signed weights whenever it opens the graph."""
    export = exported(UNTIED).export
    signed, unsigned = lowering(export, PerToken()), lowering(export, PerToken())
    unsigned.context = replace(unsigned.context, unsigned=True)
    logits = [decoder(lowered.save(), lowered.geometry)(ids) for lowered in (signed, unsigned)]
    assert np.array_equal(*logits)
    kinds = [{node.inputs[1].dtype for node in it.nodes("MatMulIntegerToFloat")} for it in (signed, unsigned)]
    assert kinds == [{ir.DataType.INT8}, {ir.DataType.UINT8}]


def test_a_form_of_other_targets_is_refused_by_name(exported, lowering):
    lowered = lowering(exported(BIASES).export, BLOCKS, BLOCKS, layers={f"{LAYER}.mlp.down_proj": Computed()})
    with pytest.raises(BuildError, match=rf"{LAYER}.mlp.down_proj .* Computed.* expected fp32, fp16,"):
        lowered.apply("lower linears")


def test_graphs_share_the_weights_they_have_in_common(exported, lowering):
    lowered = lowering(exported(TIED).export, BLOCKS)
    other = ir.load(exported(TIED).export / "decoder.onnx")
    lowered.apply("lower embedding")
    written = (lowered.folder / "weights.bin").stat().st_size
    passes.lower(other, "cpu", replace(lowered.context, phase="decode"))
    assert (lowered.folder / "weights.bin").stat().st_size == written


def scalings(lowered) -> int:
    """Multiplications by token scales right behind an integer product."""
    products = lowered.nodes("MatMulIntegerToFloat")
    return sum(node.op_type == "Mul" for product in products for node, _ in product.outputs[0].uses())


def test_defer_token_scales_moves_the_scales_of_the_up_projections_behind_the_down_projections(exported, lowering):
    lowered = lowering(exported(UNTIED).export, PerToken()).before("defer token scales")
    assert scalings(lowered) == 10
    assert lowered.apply("defer token scales") == 2
    assert scalings(lowered) == 8
    up = lowered.node(f"{LAYER}.mlp.up_proj.MatMulIntegerToFloat")
    assert [node.op_type for node, _ in up.outputs[0].uses()] == ["Reshape"]


def test_defer_token_scales_leaves_a_projection_with_a_bias(exported, lowering):
    """(y * scales + bias) has no factor per token."""
    assert lowering(exported(BIASES).export, PerToken()).apply("defer token scales") == 0


@pytest.mark.parametrize(
    ("name", "form", "operator"),
    [
        (TIED, Float32(), "Gather"),
        (UNTIED, Float32(), "Gather"),
        ("qwen2-tied-bf16", BLOCKS, "GatherBlockQuantized"),
        (UNTIED, BLOCKS, "GatherBlockQuantized"),
    ],
)
def test_lower_embedding_gathers_rows_in_the_form_of_the_head(exported, lowering, name, form, operator):
    lowered = lowering(exported(name).export, form)
    assert lowered.apply("lower embedding") == 1
    [gather] = lowered.nodes(operator)
    assert gather.inputs[1].name == "input_ids"
    assert not lowered.nodes("Cast")[1:]  # one for the positions, none for the rows
    rows, head = gather.inputs[0].const_value, lowered.graph.outputs[0].producer().inputs[1].const_value
    assert (rows.offset == head.offset) == (name != UNTIED)


@varied
def test_no_dead_node_and_no_unread_initializer_is_left(case, lowering):
    lowered = lowering(case.export, PerToken())
    lowered.apply("remove dead nodes")
    alive = {output.name for output in lowered.graph.outputs}
    for node in reversed(list(lowered.graph)):
        assert alive & {value.name for value in node.outputs}, node.name
        alive |= {value.name for value in node.inputs if value is not None}
    assert set(lowered.graph.initializers) <= alive
