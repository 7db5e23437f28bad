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


# ------------------------------------------------------------------------------------------------------ raise linears


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


def test_raise_linears_sees_through_the_cast_of_a_half_precision_weight(exported, lowering):
    lowered = lowering(exported("qwen2-tied-bf16").export)
    lowered.apply("raise linears")
    q_proj = lowered.node(f"{LAYER}.self_attn.q_proj")
    assert names(q_proj.inputs)[1:] == [f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.q_proj.bias"]
    assert {value.dtype for value in q_proj.inputs[1:]} == {ir.DataType.BFLOAT16}


def test_raise_linears_takes_no_residual_for_a_bias(exported, lowering):
    lowered = lowering(exported(WINDOW).export)
    lowered.apply("raise linears")
    assert len(lowered.node(f"{LAYER}.self_attn.o_proj").inputs) == 2
    assert names(lowered.node(f"{LAYER}.residual").inputs)[0] == "hidden.0"


def test_raise_linears_leaves_an_addition_of_another_name(exported, lowering):
    lowered = lowering(exported(BIASES).export)
    lowered.node(f"{LAYER}.self_attn.o_proj.bias").name = "offset"
    assert lowered.apply("raise linears") == 15
    linear = lowered.node(f"{LAYER}.self_attn.o_proj")
    assert len(linear.inputs) == 2
    assert lowered.node("offset").inputs[0] is linear.outputs[0]


# -------------------------------------------------------------------------------------------------- pack projections


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


def test_pack_projections_sees_through_qk_norm(exported, lowering):
    lowered = lowering(exported(QK_NORM).export)
    assert lowered.apply("pack projections") == 2
    attention = lowered.node(f"{LAYER}.self_attn")
    assert attention.inputs[0].producer().op_type == "Reshape"
    assert attention.inputs[2].producer().op_type == "Split"


def test_pack_projections_refuses_linears_of_different_activations(exported, lowering):
    lowered = lowering(exported(WINDOW).export).before("pack projections")
    through_identity(lowered.node(f"{LAYER}.self_attn.k_proj"), 0)
    with pytest.raises(BuildError, match=f"{LAYER}.self_attn: query, key and value do not read the same activation"):
        lowered.apply("pack projections")


def test_pack_projections_refuses_what_is_no_linear(exported, lowering):
    lowered = lowering(exported(WINDOW).export).before("pack projections")
    through_identity(lowered.node(f"{LAYER}.self_attn"), 2)
    with pytest.raises(BuildError, match="expected a linear before attention, found Identity"):
        lowered.apply("pack projections")


# --------------------------------------------------------------------------------------------------- lower attention


def test_lower_attention_keeps_heads_scale_and_window(exported, lowering):
    lowered = lowering(exported("qwen2-window-in-second-layer").export)
    assert lowered.apply("lower attention") == 2
    first, second = lowered.nodes("GroupQueryAttention")
    attributes = {name: attribute.value for name, attribute in second.attributes.items()}
    assert attributes == {
        "num_heads": 4,
        "kv_num_heads": 2,
        "scale": pytest.approx(0.25),
        "local_window_size": 5,
        "do_rotary": 1,
        "rotary_interleaved": 0,
        "softcap": 0.0,
    }
    assert first.attributes["local_window_size"].as_int() == -1
    assert first.inputs[5:] == second.inputs[5:]  # positions and rotary tables are made once
    assert names(lowered.graph.outputs)[1:] == [f"present.{i}.{part}" for i in (0, 1) for part in ("key", "value")]


def test_lower_attention_reads_the_packed_projection_as_it_is(exported, lowering):
    lowered = lowering(exported(WINDOW).export)
    lowered.apply("lower attention")
    attention = lowered.node(f"{LAYER}.self_attn")
    assert attention.inputs[0].producer().name == f"{LAYER}.self_attn.qkv_proj"
    assert attention.inputs[1:3] == (None, None)


@pytest.mark.parametrize("name", [QK_NORM, WINDOW])
def test_lower_attention_reads_three_parts_that_are_not_one_split_in_order(exported, lowering, name):
    lowered = lowering(exported(name).export).before("lower attention")
    attention = lowered.node(f"{LAYER}.self_attn")
    if name == WINDOW:  # key and value exchanged
        key, value = attention.inputs[1:3]
        attention.replace_input_with(1, value)
        attention.replace_input_with(2, key)
    parts = attention.inputs[:3]
    lowered.apply("lower attention")
    assert lowered.node(f"{LAYER}.self_attn").inputs[:3] == parts


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


def test_lower_attention_makes_the_places_of_new_keys_once(exported, lowering):
    lowered = lowering(exported(CAPPED).export)
    lowered.apply("lower attention")
    assert len({id(node.inputs[1]) for node in lowered.nodes("ScatterND")}) == 1


# --------------------------------------------------------------------------------------- norms and activation


def test_lower_norms_inlines_every_weight_as_float32(exported, lowering):
    lowered = lowering(exported("qwen2-tied-bf16").export)
    assert lowered.apply("lower norms") == 5
    assert not lowered.nodes("RMSNormalization")
    for norm in lowered.nodes("SimplifiedLayerNormalization"):
        tensor = norm.inputs[1].const_value
        assert (tensor.dtype, isinstance(tensor, ir.ExternalTensor)) == (ir.DataType.FLOAT, False)


def test_lower_norms_refuses_a_weight_that_is_computed(exported, lowering):
    lowered = lowering(exported(WINDOW).export).before("lower norms")
    norm = lowered.node("model.norm")
    norm.replace_input_with(1, norm.inputs[0])
    with pytest.raises(BuildError, match=re.escape("logit_rows.out is no weight of the checkpoint")):
        lowered.apply("lower norms")


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
