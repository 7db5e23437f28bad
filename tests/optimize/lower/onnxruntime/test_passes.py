"""Each pass of the CPU's lowering finds what it is for, and leaves alone what only looks like it."""

import re
from dataclasses import replace

import onnx_ir as ir
import pytest

from llmc.errors import BuildError

BIASES, QK_NORM, WINDOW = "llama-biases", "qwen3-tied-sharded", "mistral-window-wide-heads"
CAPPED = "gemma2-softcaps"
LAYER = "model.layers.0"


def names(values) -> list[str | None]:
    return [value.name if value is not None else None for value in values]


def through_identity(reader: ir.Node, index: int) -> None:
    """Put an Identity between a node and one of its inputs."""
    node = ir.node("Identity", [reader.inputs[index]])
    node.outputs[0].name = f"{reader.name}.identity"
    node.name = f"{reader.name}.identity"
    reader.prepend(node)
    reader.replace_input_with(index, node.outputs[0])


def test_raise_linears_keeps_names_weights_and_biases(exported, lowering):
    lowered = lowering(exported(BIASES).export)
    assert lowered.apply("raise linears") == 15
    assert not lowered.nodes("MatMul") + lowered.nodes("Transpose")
    down = lowered.node(f"{LAYER}.mlp.down_proj")
    assert (down.domain, down.op_type, down.attributes["parts"].as_int()) == ("llmc", "Linear", 1)
    assert names(down.inputs) == [
        f"{LAYER}.mlp.mul.out",
        f"{LAYER}.mlp.down_proj.weight",
        f"{LAYER}.mlp.down_proj.bias",
    ]


def test_raise_linears_leaves_an_addition_of_another_name(exported, lowering):
    lowered = lowering(exported(BIASES).export)
    lowered.node(f"{LAYER}.self_attn.o_proj.bias").name = "offset"
    assert lowered.apply("raise linears") == 15
    linear = lowered.node(f"{LAYER}.self_attn.o_proj")
    assert len(linear.inputs) == 2
    assert lowered.node("offset").inputs[0] is linear.outputs[0]


@pytest.mark.parametrize(("name", "inputs"), [(WINDOW, 4), (BIASES, 7)])
def test_pack_projections_makes_one_linear_of_three(exported, lowering, name, inputs):
    lowered = lowering(exported(name).export)
    assert lowered.apply("pack projections") == 2
    packed = lowered.node(f"{LAYER}.self_attn.qkv_proj")
    assert len(packed.inputs) == inputs
    assert packed.attributes["parts"].as_int() == 3
    assert [part for part in ("q", "k", "v") if f"{part}_proj" in str(names(packed.inputs))] == ["q", "k", "v"]
    split = next(node for node, _ in packed.outputs[0].uses())
    g = lowered.geometry.attentions[0]
    assert split.inputs[1].const_value.numpy().tolist() == [g.head_dim * n for n in (g.heads, g.kv_heads, g.kv_heads)]


def test_pack_projections_refuses_what_is_no_linear(exported, lowering):
    lowered = lowering(exported(WINDOW).export).before("pack projections")
    through_identity(lowered.node(f"{LAYER}.self_attn"), 2)
    with pytest.raises(BuildError, match="expected a linear before attention, found Identity"):
        lowered.apply("pack projections")


def test_lower_attention_reads_the_packed_projection_as_it_is(exported, lowering):
    lowered = lowering(exported(WINDOW).export)
    lowered.apply("lower attention")
    attention = lowered.node(f"{LAYER}.self_attn")
    assert attention.inputs[0].producer().name == f"{LAYER}.self_attn.qkv_proj"
    assert attention.inputs[1:3] == (None, None)


@pytest.mark.parametrize(("phase", "expected"), [("prefill", 0), ("decode", 2), ("shared", 2)])
def test_lower_attention_takes_softcaps_apart_where_many_tokens_come_at_once(exported, lowering, phase, expected):
    lowered = lowering(exported(CAPPED).export)
    lowered.context = replace(lowered.context, phase=phase)
    assert lowered.apply("lower attention") == 2
    whole = lowered.nodes("GroupQueryAttention")
    assert len(whole) == expected
    assert all(node.attributes["softcap"].as_float() == 2.0 for node in whole)
    assert len([node for node in lowered.nodes("Tanh") if ".self_attn" in node.name]) == 2 - expected
    assert names(lowered.graph.outputs)[1:] == [f"present.{i}.{part}" for i in (0, 1) for part in ("key", "value")]


def test_every_norm_keeps_its_own_epsilon(exported, lowering):
    lowered = lowering(exported(QK_NORM).export)
    wanted = {}
    for number, node in enumerate(lowered.nodes("RMSNormalization"), 1):
        wanted[node.name] = number / 1000
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", wanted[node.name])
    lowered.apply("lower norms")
    norms = lowered.nodes("SimplifiedLayerNormalization")
    # A node that takes the place of another one of its name is numbered.
    found = {re.sub(r"_\d+$", "", node.name): node.attributes["epsilon"].as_float() for node in norms}
    assert found == pytest.approx(wanted)


def test_fuse_silu_takes_the_product_with_its_own_sigmoid(exported, lowering):
    lowered = lowering(exported(WINDOW).export)
    assert lowered.apply("fuse SiLU") == 2
    assert not lowered.nodes("Sigmoid")
    assert [node.attributes["alpha"].as_float() for node in lowered.nodes("QuickGelu")] == [1.0, 1.0]


def sigmoid_of_another_value(lowered) -> None:
    through_identity(lowered.nodes("Sigmoid")[0], 0)


def sigmoid_read_twice(lowered) -> None:
    down = lowered.node(f"{LAYER}.mlp.mul")
    down.replace_input_with(1, lowered.nodes("Sigmoid")[0].outputs[0])


def sum_instead_of_product(lowered) -> None:
    lowered.node(f"{LAYER}.mlp.act_fn.mul").op_type = "Add"


@pytest.mark.parametrize("edit", [sigmoid_of_another_value, sigmoid_read_twice, sum_instead_of_product])
def test_fuse_silu_leaves_what_is_no_silu(exported, lowering, edit):
    lowered = lowering(exported(WINDOW).export).before("fuse SiLU")
    edit(lowered)
    assert lowered.apply("fuse SiLU") == 1
    assert len(lowered.nodes("Sigmoid")) == 1
