"""What each pass of TensorRT leaves behind: which operators, which types; and a pass that misses its mark is named."""

import re
from collections import Counter
from dataclasses import replace

import onnx_ir as ir
import pytest
from doubles.lowerings import varied

from llmc.errors import BuildError
from llmc.optimize import passes
from llmc.optimize.lower.context import Computed, Float32, PerToken, Static, WeightOnly
from llmc.optimize.lower.rewrite import remove_dead
from llmc.optimize.quantize.grid import Grid

BIASES, WINDOW, TIED, NORMS = (
    "llama-biases",
    "qwen2-window-in-second-layer",
    "qwen3-tied-sharded",
    "qwen3-biases-window-in-first-layer",
)
LAYER = "model.layers.0"
COMPUTES = ("float32", "float16", "bfloat16")
INT8, INT4 = WeightOnly(Grid(8, positive=True)), WeightOnly(Grid(4, 32, positive=True))
WEIGHTS = {"float": Computed(), "int8": INT8, "int4": INT4, "static int8": Static(INT8.grid)}


def operators(lowered) -> Counter[str]:
    return Counter(node.op_type for node in lowered.graph)


class Ranged:
    """Calibration that saw the same range everywhere."""

    def __init__(self, calibrated) -> None:
        self._calibrated = calibrated

    def __getattr__(self, name):
        return getattr(self._calibrated, name)

    def activation(self, module: str) -> float:
        return 8.0


def finished(lowering, case, weights: str, compute: str):
    head = INT8 if weights == "static int8" else WEIGHTS[weights]
    lowered = lowering(case.export, WEIGHTS[weights], head, compute=compute)
    lowered.context = replace(lowered.context, calibrated=Ranged(lowered.context.calibrated))
    return lowered.finish()


@pytest.mark.parametrize("compute", COMPUTES)
def test_inputs_and_outputs_are_those_of_the_contract(exported, lowering, compute):
    lowered = finished(lowering, exported(BIASES), "float", compute)
    caches = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    kind = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}[compute]
    cache = ("batch", 2, "capacity", 16)

    def described(values):
        return {v.name: (v.dtype.name, *(d if isinstance(d, int) else str(d.value) for d in v.shape)) for v in values}

    assert described(lowered.graph.inputs) == {
        "input_ids": ("INT64", "batch", "sequence"),
        "past_lengths": ("INT64", "batch"),
        "logit_indices": ("INT64", "batch", "outputs"),
        "cache_slots": ("INT64", "attended"),
        **{f"past_key_values.{name}": (kind, *cache) for name in caches},
    }
    assert described(lowered.graph.outputs) == {
        "logits": ("FLOAT", "batch", "outputs", 96),
        "top_logits": ("FLOAT", "batch", "outputs", 96),
        "top_ids": ("INT64", "batch", "outputs", 96),
        "sum_exp": ("FLOAT", "batch", "outputs", 1),
        **{f"present.{name}": (kind, *cache) for name in caches},
    }
    assert all(value.uses() for value in lowered.graph.inputs)


@varied
def test_no_dead_node_and_no_unread_initializer_is_left(case, lowering):
    lowered = lowering(case.export, INT4).finish()
    assert remove_dead(lowered.graph) == 0
    assert all(value.uses() for value in lowered.graph.initializers.values())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_linears_that_read_the_same_activation_become_one(exported, lowering, weights):
    lowered = lowering(exported(NORMS).export, WEIGHTS[weights])
    assert lowered.apply("pack linears") == 2 * 2
    attention, mlp = (lowered.node(f"{LAYER}.{name}") for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    assert (attention.attributes["parts"].as_int(), mlp.attributes["parts"].as_int()) == (3, 2)
    assert len(lowered.nodes("Split")) == len(lowered.nodes("Linear")) - 5 == 4


@pytest.mark.parametrize(("weights", "packs"), [("float", 0), ("int8", 4)])
def test_tensorrt_rtx_which_stores_packed_floats_twice_gets_integers_packed_alone(exported, lowering, weights, packs):
    lowered = lowering(exported(NORMS).export, WEIGHTS[weights]).before("pack linears")
    steps = {step.name: step.run for step in passes.PASSES["tensorrt-rtx"]}
    assert steps["pack linears"](lowered.graph, lowered.context) == packs


def test_linears_in_different_forms_stay_apart(exported, lowering, decoder, portable, ids):
    layers = {"*.0.self_attn.k_proj": INT8, "*.1.mlp.up_proj": INT8}
    case = exported(NORMS)
    lowered = lowering(case.export, INT4, layers=layers)
    assert lowered.apply("pack linears") == 2
    found = decoder(lowered.finish().write())(ids)
    wanted = decoder(portable(lowered))(ids)
    assert abs(found - wanted).max() <= 2e-4  # FLOAT_TOLERANCE of test_lowered_graph


def test_lower_attention_updates_the_cache_in_place_and_reads_what_is_asked_for(exported, lowering):
    lowered = lowering(exported(WINDOW).export)
    assert lowered.apply("lower attention") == 2
    found = operators(lowered)
    assert (found["TensorScatter"], found["Slice"], found["RotaryEmbedding"], found["Attention"]) == (4, 4, 4, 2)
    for layer in range(2):
        attention = lowered.node(f"model.layers.{layer}.self_attn")
        assert attention.attributes["scale"].as_float() == 1.0
        times = attention.inputs[0].producer()
        assert (times.op_type, float(times.inputs[1].const_value.numpy())) == ("Mul", 0.25), "the query alone is scaled"
        for value, part in zip(attention.inputs[1:3], ("key", "value"), strict=True):
            update = value.producer().inputs[0].producer()
            assert update.op_type == "TensorScatter" and update.outputs[0].is_graph_output()
            assert update.inputs[0].name == f"past_key_values.{layer}.{part}"
            assert update.inputs[2].name == "past_lengths"


@pytest.mark.parametrize(("name", "comparisons"), [(BIASES, 1), (WINDOW, 2), ("mistral-window-wide-heads", 1)])
def test_layers_with_the_same_window_share_a_mask(exported, lowering, name, comparisons):
    lowered = lowering(exported(name).export)
    lowered.apply("lower attention")
    assert len({node.inputs[3] for node in lowered.nodes("Attention")}) == comparisons


def test_integer_weights_are_dequantized_by_output_or_in_blocks_of_inputs(exported, lowering):
    lowered = lowering(exported(BIASES).export, INT4, INT8, compute="float16")
    assert lowered.apply("lower linears") == 15
    found = {node.name: node for node in lowered.nodes("DequantizeLinear")}
    assert len(found) == 4 * 2 + 1
    down = found[f"{LAYER}.mlp.down_proj.weight.DequantizeLinear"]
    values, scales = (value.const_value for value in down.inputs)
    assert (values.dtype, tuple(values.shape)) == (ir.DataType.INT4, (96, 64))
    assert (scales.dtype, tuple(scales.shape)) == (ir.DataType.FLOAT16, (3, 64))
    assert (down.attributes["axis"].as_int(), down.attributes["block_size"].as_int()) == (0, 32)
    head = found["lm_head.weight.DequantizeLinear"]
    values, scales = (value.const_value for value in head.inputs)
    assert (values.dtype, tuple(values.shape)) == (ir.DataType.INT8, (64, 96))
    assert tuple(scales.shape) == (96,) and head.attributes["axis"].as_int() == 1


def test_a_tied_head_of_floats_reads_the_embeddings_bytes(exported, lowering):
    lowered = lowering(exported(TIED).export, compute="bfloat16").finish()
    tables = [value for name, value in lowered.graph.initializers.items() if "embed_tokens" in name]
    assert [value.name for value in tables] == ["model.embed_tokens.weight.bfloat16"]
    assert {node.op_type for node, _ in tables[0].uses()} == {"Gather", "Transpose"}


def test_a_block_that_does_not_divide_the_inputs_becomes_the_largest_that_does(exported, lowering):
    lowered = lowering(exported(BIASES).export, WeightOnly(Grid(4, 128, positive=True)))
    lowered.apply("lower linears")
    blocks = {node.name: node.attributes["block_size"].as_int() for node in lowered.nodes("DequantizeLinear")}
    assert blocks[f"{LAYER}.self_attn.qkv_proj.weight.DequantizeLinear"] == 64
    assert blocks[f"{LAYER}.mlp.down_proj.weight.DequantizeLinear"] == 32
    assert lowered.graph.metadata_props[f"llmc.block.{LAYER}.mlp.down_proj"] == "32"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (Float32(), "takes no weights stored as"),
        (PerToken(), "takes no weights stored as"),
        (WeightOnly(Grid(8, 32)), "takes no weights stored as"),
        (WeightOnly(Grid(4)), "takes no weights stored as"),
        (WeightOnly(Grid(4, 32, symmetric=False)), "has no zero points"),
        (WeightOnly(Grid(4, 32)), "takes only scales above zero"),
    ],
)
def test_weights_that_tensorrt_does_not_take_are_refused_by_name(exported, lowering, stored, said):
    with pytest.raises(BuildError, match=f"{LAYER}.self_attn.q_proj: TensorRT {said}"):
        lowering(exported(BIASES).export, stored).apply("lower linears")


@pytest.mark.parametrize("head", [Computed(), INT8, INT4])
@pytest.mark.parametrize("name", [BIASES, TIED])
def test_the_embedding_is_in_the_type_of_activations_beside_a_head_of_integers(exported, lowering, name, head):
    """TensorRT gathers no integers, so a tied head of integers has bytes of its own."""
    lowered = lowering(exported(name).export, Computed(), head, compute="float16").finish()
    tables = {key: value for key, value in lowered.graph.initializers.items() if "embed_tokens.weight" in key}
    [gather] = [node for node in lowered.nodes("Gather") if node.inputs[0] in tables.values()]
    assert (gather.inputs[0].const_value.dtype.name, gather.inputs[1].name) == ("FLOAT16", "input_ids")
    integers = [key for key, value in tables.items() if value.const_value.dtype.name in ("INT8", "INT4")]
    assert len(integers) == (name == TIED and head != Computed())


def of_another_kind(op_type: str):
    """The last node of a kind: the head, which is packed with nothing."""

    def edit(graph: ir.Graph, _) -> int:
        [node for node in graph if node.op_type == op_type][-1].op_type = "Unknown"
        return 1

    return edit


def unnamed_embedding(graph: ir.Graph, _) -> int:
    next(node for node in graph if node.name == "model.embed_tokens").name = "table"
    return 1


@pytest.mark.parametrize(
    ("name", "edit", "found", "expected"),
    [
        ("raise linears", of_another_kind("MatMul"), 14, 15),
        ("lower attention", of_another_kind("CachedAttention"), 1, 2),
        ("lower linears", of_another_kind("Linear"), 14, 15),
        ("lower embedding", unnamed_embedding, 0, 1),
    ],
)
def test_a_pass_that_misses_its_mark_is_named(exported, lowering, monkeypatch, name, edit, found, expected):
    lowered = lowering(exported(BIASES).export)
    steps = list(lowered.steps)
    steps.insert([step.name for step in steps].index(name), passes.Step("edit", edit))
    monkeypatch.setitem(passes.PASSES, "edited", tuple(steps))
    sentence = f"pass '{name}' applied {found} times to the single graph, {expected} expected for 2 layers"
    with pytest.raises(BuildError, match=re.escape(sentence)):
        passes.lower(lowered.model, "edited", lowered.context)
