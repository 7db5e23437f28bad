"""The exported file: contract 1, names that later stages rely on, weights by reference, nothing superfluous."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors import safe_open

from llmc.bundle import GRAPH_CONTRACT_VERSION, read_export
from llmc.export.blocks.rope import inverse_frequencies
from llmc.export.decoder import DecoderLayer
from llmc.export.graph import check_graph
from llmc.export.ops import functions
from llmc.export.recurrent_ops import functions as recurrent_functions
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.made import MadeTensor


@pytest.fixture(scope="session")
def model(case) -> ir.Model:
    return ir.load(case.export / "decoder.onnx")


def signature(values: list[ir.Value]) -> dict[str, tuple[str, list[int | str]]]:
    return {
        value.name: (value.dtype.name, [d if isinstance(d, int) else str(d) for d in value.shape]) for value in values
    }


def test_inputs_and_outputs_are_those_of_the_contract(case, model):
    geometry = read_export(case.export).geometry
    shapes = {
        name: ("FLOAT", ["batch", *cache.shape])
        if cache.kind == "state"
        else ("FLOAT", ["batch", cache.shape[0], "capacity", cache.shape[1]])
        for cache in geometry.caches
        for name in cache.inputs
    }
    states = {"new_lengths": ("INT64", ["batch"])} if geometry.has_states else {}
    states |= {"text_lengths": ("INT64", ["batch"])} if geometry.long_after else {}
    assert signature(model.graph.inputs) == {
        "input_ids": ("INT64", ["batch", "sequence"]),
        "past_lengths": ("INT64", ["batch"]),
        "logit_indices": ("INT64", ["batch", "outputs"]),
        **shapes,
        **states,
    }
    outputs = [name for cache in geometry.caches for name in cache.outputs]
    assert signature(model.graph.outputs) == {
        "logits": ("FLOAT", ["batch", "outputs", geometry.vocab_size]),
        **dict(zip(outputs, shapes.values(), strict=True)),
    }
    assert list(signature(model.graph.inputs)) == ["input_ids", "past_lengths", "logit_indices", *shapes, *states]


def test_the_file_says_what_it_is(invented_case):
    model = ir.load(invented_case.export / "decoder.onnx")
    assert model.opset_imports == {"": 24, "llmc": 1}
    assert model.metadata_props["llmc.graph_contract"] == str(GRAPH_CONTRACT_VERSION)
    assert model.metadata_props.keys() == {"llmc.graph_contract", "llmc_version", "producer"}
    assert model.producer_name == "llmc"


def test_one_attention_node_per_layer_carries_the_geometry(case, model):
    geometry, config = read_export(case.export).geometry, read_checkpoint(case.checkpoint).config
    attentions = [node for node in model.graph if node.op_type == "CachedAttention"]
    assert [node.name for node in attentions] == [attention.name for attention in geometry.writing]
    for node, attention in zip(attentions, geometry.writing, strict=True):
        i = attention.layer
        turned = attention.rope is not None and not attention.turned_before
        switching = turned and config.ropes[attention.rope].long_factors
        assert {name: attribute.value for name, attribute in node.attributes.items()} == {
            "num_heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "scale": pytest.approx(config.layers[i].attention.scale or attention.head_dim**-0.5),
            "window": attention.window,
            "softcap": pytest.approx(config.layers[i].attention.softcap),
            "growth": pytest.approx(config.layers[i].attention.query_growth),
            "period": config.layers[i].attention.grows_after or 1,
            "rotary_dim": attention.rotary_dim if turned else attention.head_dim,
            "interleaved": int(attention.rope is not None and config.ropes[attention.rope].interleaved),
            "magnitude": pytest.approx(1.0 if attention.rope is None else config.ropes[attention.rope].magnitude),
        }
        assert [value.name for value in node.inputs[3:]] == [
            f"past_key_values.{i}.key",
            f"past_key_values.{i}.value",
            "past_lengths",
            *([f"{node.name}.sinks.cast.out"] if attention.sinks else []),
            f"rotary_emb.{attention.rope}.where.out"
            if switching
            else f"rotary_emb.{attention.rope}.inv_freq"
            if turned
            else f"{node.name}.rotary_emb.inv_freq",
        ]
        assert [value.name for value in node.outputs[1:]] == [f"present.{i}.key", f"present.{i}.value"]


def test_nodes_are_named_like_the_modules_of_the_checkpoint(case, model):
    names = [node.name for node in model.graph]
    parameters = read_checkpoint(case.checkpoint).config.parameter_shapes
    modules = {name.removesuffix(".weight") for name in parameters if name.endswith(".weight")}
    biases = {f"{linear.name}.bias" for linear in read_export(case.export).geometry.linears if linear.bias}
    assert len(names) == len(set(names))
    mixtures = read_export(case.export).geometry.mixtures
    modules -= {part.name for item in mixtures for part in item.parts}  # one node reads them
    rows = "shared_rows" if read_export(case.export).geometry.shares else "logit_rows"
    assert (modules | biases | {"lm_head", rows} | {item.name for item in mixtures}) <= set(names)
    operators = {node.name: node.op_type for node in model.graph}
    assert operators["model.layers.1.self_attn.q_proj"] == "MatMul"
    kinds = {"rms": "RMSNormalization", "layer": "LayerNormalization"}
    assert all(operators[norm.name] == kinds[norm.kind] for norm in read_export(case.export).geometry.norms)
    assert operators["model.embed_tokens"] == "Gather"
    assert {operators[name] for name in biases} <= {"Add"}


def test_the_graph_can_be_cut_between_layers(case, model):
    geometry = read_export(case.export).geometry
    producers = {value.name: node.name for node in model.graph for value in node.outputs}
    assert producers["hidden.0"].startswith(("model.embed_tokens", "model.embed_norm", "embedding_scale", "residual"))
    mlps = {part.layer for part in (*geometry.mlps, *geometry.mixtures)}
    both = mlps & {part.layer for part in (*geometry.attentions, *geometry.recurrents)}
    for i in range(geometry.layers if not geometry.layer_scalars else 0):
        assert producers[f"hidden.{i + 1}"] == f"model.layers.{i}.residual" + ("_1" if i in both else "")
    readers = {node.name: [value.name for value in node.inputs] for node in model.graph}
    attention = "model.layers.1.self_attn"
    linear = geometry.linear.get(f"{attention}.q_a_proj", geometry.linear[f"{attention}.q_proj"])
    assert readers[linear.reads if linear.producer else linear.name][0] == "hidden.1"
    assert readers["model.norm" if geometry.shares else "logit_rows"][0] == f"hidden.{geometry.layers}"


def test_the_head_sees_only_the_rows_that_were_asked_for(case, model):
    """Layers that read caches of others see only these, too."""
    shared = next((item.layer for item in read_export(case.export).geometry.attentions if not item.writes), None)
    first = "model.norm" if shared is None else f"model.layers.{shared}.input_layernorm"
    norm = next(node for node in model.graph if node.name == first)
    assert norm.inputs[0].producer().op_type == "GatherND"


def test_weights_are_referenced_where_the_checkpoint_keeps_them(case, model):
    tensors = read_checkpoint(case.checkpoint).tensors
    external = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert external.keys() == tensors.keys()
    for name, tensor in external.items():
        if isinstance(tensors[name], MadeTensor):
            continue
        file = case.export / tensor.location
        assert file.samefile(case.checkpoint / tensor.location)
        with file.open("rb") as stream:
            stream.seek(tensor.offset)
            data = stream.read(tensor.length)
        kept = stored_bytes(case.checkpoint / tensors[name].file)
        assert data == kept[name] if name in kept else any(data in other for other in kept.values())
        assert tensor.shape.numpy() == tensors[name].shape


@cache
def stored_bytes(file: Path) -> dict[str, bytes]:
    """The tensors' bytes by the safetensors library, independent of our reading of its header."""
    import torch

    with safe_open(file, framework="pt") as tensors:
        found = {name: tensors.get_tensor(name).contiguous() for name in tensors.keys()}  # noqa: SIM118
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def test_the_file_stays_small_and_keeps_no_trace_of_the_exporter(case, model):
    assert (case.export / "decoder.onnx").stat().st_size < 32_000 * len(read_checkpoint(case.checkpoint).config.layers)
    assert not any(node.metadata_props or node.doc_string for node in model.graph)
    assert {node.op_type for node in model.graph} <= {
        *("Add", "Cast", "CachedAttention", "Constant", "CumSum", "Div", "Gather", "GatherND", "Gelu"),
        *("LayerNormalization", "LessOrEqual", "MatMul", "Mul", "RMSNormalization", "Relu", "Reshape", "RotatedHeads"),
        *("Sigmoid", "Sub", "Tanh", "Transpose", "Unsqueeze", "CausalConv", "LinearAttention", "Slice", "Softplus"),
        *("Exp", "Neg", "Softmax", "Experts", "SharedAttention", "CastLike", "Clip", "Concat", "GreaterOrEqual"),
        *("Pad", "ReduceSum", "TopK", "Where", "Greater"),
    }
    used = {("llmc", node.op_type) for node in model.graph if node.domain == "llmc"}
    assert {key[:2] for key in model.functions} == used


def test_the_attention_function_is_standard_onnx():
    function = functions()[0]
    assert {node.domain for body in (function, *recurrent_functions()) for node in body.node} == {""}
    assert {"RotaryEmbedding", "TensorScatter", "Attention"} <= {node.op_type for node in function.node}
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert {node.op_type for node in function.node} <= known


def test_frequencies_are_the_only_computed_weights(case, model):
    inline = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if not isinstance(value.const_value, ir.ExternalTensor)
    }
    computed = {name: tensor.numpy() for name, tensor in inline.items() if not name.startswith("shape.")}
    config = read_checkpoint(case.checkpoint).config
    ropes = {f"rotary_emb.{i}.inv_freq": rope for i, rope in enumerate(config.ropes)}
    long = {f"rotary_emb.{i}.long_inv_freq": rope for i, rope in enumerate(config.ropes) if rope.long_factors}
    for name, rope in long.items():
        np.testing.assert_array_equal(computed.pop(name), inverse_frequencies(rope, long=True))
    assert computed.keys() - ropes.keys() == {
        f"{attention.name}.rotary_emb.inv_freq"
        for attention in config.geometry.attentions
        if attention.rope is None or attention.turned_before
    }
    for name, frequencies in computed.items():
        assert frequencies.dtype == np.float32
        np.testing.assert_array_equal(frequencies, inverse_frequencies(ropes[name]) if name in ropes else 0)


def test_the_inventory_lists_every_node_in_the_order_of_the_computation(case, model):
    geometry = read_export(case.export).geometry
    assert geometry.is_sound and geometry == read_checkpoint(case.checkpoint).geometry
    check_graph(model, geometry)


@pytest.mark.parametrize("parts", ["linears", "norms", "attentions"])
def test_an_inventory_of_another_count_is_noticed(invented_case, parts):
    model, geometry = ir.load(invented_case.export / "decoder.onnx"), read_export(invented_case.export).geometry
    check_graph(model, geometry)
    listed = getattr(geometry, parts)
    for wrong in (listed[1:], (*listed, replace(listed[0], name="another")), listed[::-1]):
        with pytest.raises(AssertionError, match="the inventory lists"):
            check_graph(model, replace(geometry, **{parts: wrong}))


def test_norms_are_listed_in_the_order_of_the_layer_whatever_the_seed_of_hashes(random_checkpoint):
    """The order of modules is that of the file's tensors: two exports of a checkpoint are the same bytes."""
    layer = DecoderLayer(read_checkpoint(random_checkpoint("gemma3-two-ropes")).config, 0)
    places = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    assert [name for name, _ in layer.named_children() if name.endswith("layernorm")] == [*places]
