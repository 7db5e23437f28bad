"""The exported graph computes what transformers computes, however the tokens are fed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.bundle import MADE_FILE, Geometry, read_export
from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint

# Largest absolute difference of logits from transformers in float32. Both sides sum in different orders, which costs
# about 1e-5 on these models (logits up to 20), 2e-4 with a recurrence; a wrong window, position, norm or bias costs
# more than 1e-2.
LOGIT_TOLERANCE = 4e-4
# The same module computed by torch and by ONNX Runtime.
EAGER_TOLERANCE = LOGIT_TOLERANCE

CAPACITY = 24
TOKENS = 20
Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


class Caller:
    """Feeds a graph as a runtime would, and keeps its cache."""

    def __init__(self, run: Run, geometry: Geometry, batch: int, capacity: int = CAPACITY) -> None:
        self.run, self.states, self.switches = run, geometry.has_states, geometry.long_after
        self.cache = {
            name: np.zeros(cache.shape_of(batch, capacity), np.float32)
            for cache in geometry.caches
            for name in cache.inputs
        }

    def __call__(
        self, ids: np.ndarray, past: list[int], indices: np.ndarray, new: tuple[int, ...] | None = None
    ) -> np.ndarray:
        feeds = {"input_ids": ids, "past_lengths": np.array(past, np.int64), "logit_indices": indices, **self.cache}
        if self.states:
            feeds["new_lengths"] = np.array(new or [ids.shape[1]] * len(ids), np.int64)
        if self.switches:
            feeds["text_lengths"] = np.full(len(ids), TOKENS)
        logits, *presents = self.run(feeds)
        self.cache = dict(zip(self.cache, presents, strict=True))
        return logits


def random_ids(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 96, (rows, TOKENS))


def logits_in_pieces(run: Run, geometry: Geometry, ids: np.ndarray, pieces: list[int]) -> np.ndarray:
    call, outputs, position = Caller(run, geometry, len(ids)), [], 0
    for size in pieces:
        indices = np.tile(np.arange(size), (len(ids), 1))
        outputs.append(call(ids[:, position : position + size], [position] * len(ids), indices))
        position += size
    return np.concatenate(outputs, axis=1)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def test_logits_equal_transformers(case, onnxruntime_run):
    geometry = read_export(case.export).geometry
    ids = random_ids()
    logits = logits_in_pieces(onnxruntime_run(case.export), geometry, ids, [7, 1, 12])
    assert difference(logits, case.reference(ids)) <= LOGIT_TOLERANCE


def test_ragged_batch_equals_each_row_alone(case, onnxruntime_run):
    geometry = read_export(case.export).geometry
    ids = random_ids()
    call = Caller(onnxruntime_run(case.export), geometry, 2)
    rows = [case.reference(ids[:1])[0], case.reference(ids[1:])[0]]

    # 9 tokens of row 0 and 4 of row 1, padded with token 0; the last two of each row are asked for
    first = np.stack([ids[0, :9], np.pad(ids[1, :4], (0, 5))])
    logits = call(first, [0, 0], np.array([[7, 8], [2, 3]]), (9, 4))
    assert difference(logits, np.stack([rows[0][7:9], rows[1][2:4]])) <= LOGIT_TOLERANCE

    # one token of row 0 and five of row 1: what padding wrote before is overwritten or never seen
    second = np.stack([np.pad(ids[0, 9:10], (0, 4)), ids[1, 4:9]])
    logits = call(second, [9, 4], np.array([[0], [4]]), (1, 5))
    assert difference(logits, np.stack([rows[0][9:10], rows[1][8:9]])) <= LOGIT_TOLERANCE

    logits = call(np.stack([ids[0, 10:11], ids[1, 9:10]]), [10, 9], np.zeros((2, 1), np.int64))
    assert difference(logits, np.stack([rows[0][10:11], rows[1][9:10]])) <= LOGIT_TOLERANCE


def test_eager_decoder_equals_the_graph(case, onnxruntime_run):
    geometry = read_export(case.export).geometry
    ids = random_ids()
    pieces = [7, 1, 12]
    eager = logits_in_pieces(eager_run(case.checkpoint), geometry, ids, pieces)
    graph = logits_in_pieces(onnxruntime_run(case.export), geometry, ids, pieces)
    assert difference(eager, graph) <= EAGER_TOLERANCE


def eager_run(folder: Path) -> Run:
    import torch
    from doubles.decoders import load_decoder

    decoder = load_decoder(folder)

    def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        ids, lengths, indices = (tensors[name] for name in ("input_ids", "past_lengths", "logit_indices"))
        layers = range(decoder.config.geometry.layers)
        pasts = [
            tuple(tensors[name] for cache in decoder.config.geometry.caches_of(layer) for name in cache.inputs)
            for layer in layers
        ]
        with torch.no_grad():
            more = {name: tensors.get(name) for name in ("new_lengths", "text_lengths")}
            logits, presents, *_ = decoder(ids, lengths, indices, pasts, **more)
        return [logits.numpy(), *(cache.numpy() for held in presents for cache in held)]

    return run


@pytest.mark.parametrize("name", ["gemma2-softcaps", "gpt2-scale-by-layer", "invented"])
def test_reference_evaluator_agrees(exported, name, tmp_path):
    """From a copy of the folder, since onnx opens no external data in a file with several hard links."""
    from onnx.reference import ReferenceEvaluator

    case = exported(name)
    geometry = read_export(case.export).geometry
    copy = shutil.copytree(case.export, tmp_path / "copy")
    evaluator = ReferenceEvaluator(str(copy / "decoder.onnx"))
    ids = random_ids()
    logits = logits_in_pieces(lambda feeds: evaluator.run(None, feeds), geometry, ids, [12, 8])
    assert difference(logits, case.reference(ids)) <= LOGIT_TOLERANCE


def test_far_positions_equal_transformers(window_case, onnxruntime_run):
    """Two layers with a window of 6 see 10 tokens back, so the last 10 are compared; nothing lies before the text."""
    geometry = read_export(window_case.export).geometry
    ids, start = random_ids(1), 30_000
    call = Caller(onnxruntime_run(window_case.export), geometry, 1, capacity=start + TOKENS)
    logits = call(ids, [start], np.arange(10, TOKENS)[None])
    assert difference(logits, window_case.reference(ids, start)[:, 10:]) <= LOGIT_TOLERANCE


def test_heads_of_any_even_size_equal_transformers(exported, onnxruntime_run):
    """20 is no multiple of 16, as kernels of later stages want it."""
    case = exported("llama-linear-rope-no-groups-fp16", head_dim=20)
    geometry, ids = read_export(case.export).geometry, random_ids()
    assert geometry.caches[0].shape == (4, 20)
    logits = logits_in_pieces(onnxruntime_run(case.export), geometry, ids, [7, 13])
    assert difference(logits, case.reference(ids)) <= LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("falcon_h1-both-mixers-multipliers", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
        ("falcon_h1-both-mixers-multipliers", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("stablelm-parallel-bf16", {"qk_layernorm": True}),
    ],
)
def test_groups_and_heads_are_normed_by_weights_of_their_own(random_checkpoint, transformers_model, name, changes):
    checkpoint, ids = random_checkpoint(name, **changes), random_ids()
    logits = logits_in_pieces(eager_run(checkpoint), read_checkpoint(checkpoint).geometry, ids, [7, 13])
    assert difference(logits, transformers_model(checkpoint)(ids)) <= LOGIT_TOLERANCE


def test_positions_are_not_encoded_without_a_base(random_checkpoint, transformers_model):
    rope = {"rope_type": "default", "rope_theta": None}
    folder = random_checkpoint.__wrapped__("olmo_hybrid-corrections-up-to-two", rope_parameters=rope)  # a dict
    found, ids = read_checkpoint(folder), random_ids()
    assert not found.config.ropes
    logits = logits_in_pieces(eager_run(folder), found.geometry, ids, [7, 13])
    assert difference(logits, transformers_model(folder)(ids)) <= LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("gemma3-two-ropes", "attn_logit_softcapping", 2.0), ("nemotron_h-one-part-per-layer", "attention_bias", True)],
)
def test_keys_that_transformers_never_applies_are_left_out(random_checkpoint, transformers_model, name, key, value):
    checkpoint, ids = random_checkpoint(name, **{key: value}), random_ids()
    found = read_checkpoint(checkpoint)
    assert f"config.json: {key}={value} is not applied by transformers and was left out" in found.notes
    logits = logits_in_pieces(eager_run(checkpoint), found.geometry, ids, [7, 13])
    assert difference(logits, transformers_model(checkpoint)(ids)) <= LOGIT_TOLERANCE


def test_a_rope_of_no_kind_of_layer_is_left_out(write_case, tmp_path):
    """transformers computes the layers of an OLMo 3 with it by the plain rope, and saves it."""
    flat = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    types = ["sliding_attention", "full_attention"]
    case = {"model_type": "olmo3", "sliding_window": 6, "layer_types": types, "rope_parameters": flat}
    reference, ids = write_case(case, tmp_path), random_ids()
    found = read_checkpoint(tmp_path)
    assert any("rope_parameters: rope_type, " in note or "rope_parameters: factor, " in note for note in found.notes)
    logits = logits_in_pieces(eager_run(tmp_path), found.geometry, ids, [7, 13])
    assert difference(logits, reference(ids)) <= LOGIT_TOLERANCE


def test_layers_behind_the_last_one_are_left_out(random_checkpoint, tmp_path):
    """DeepSeek-V3 stores the layer that predicts a further token as its 62nd of 61."""
    from safetensors.numpy import load_file, save_file

    checkpoint = random_checkpoint("deepseek_v3-latent-queries-corrected-groups")
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    further = {name.replace(".layers.1.", ".layers.2."): it for name, it in tensors.items() if ".layers.1." in name}
    save_file(
        {**tensors, **further, "model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    for stated in (1, 0):
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": stated}))
        if not stated:  # planted: the config speaks of no such layer
            with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\..* is unused"):
                read_checkpoint(folder)
            break
        found = read_checkpoint(folder)
        assert found.tensors.keys() == read_checkpoint(checkpoint).tensors.keys()
        assert "config.json: layers behind the last one, which predict further tokens, are left out" in found.notes


def window_off_by_one(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "CachedAttention":
            node.attributes["window"] = ir.AttrInt64("window", node.attributes["window"].as_int() + 1)


def frequencies_off_by_a_thousandth(model: ir.Model) -> None:
    value = model.graph.initializers["rotary_emb.0.inv_freq"]
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.001), name=value.name)


def epsilon_off(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "RMSNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


def residual_left_out(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.residual")
    node.replace_input_with(0, node.inputs[1])


def turned_otherwise(model: ir.Model) -> None:
    """Neighbours instead of halves, or halves instead of neighbours."""
    for node in model.graph:
        if node.op_type == "CachedAttention":
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1 - node.attributes["interleaved"].as_int())


def without_softcap(model: ir.Model) -> None:
    _set(model, "softcap", 0.0)


def without_growth(model: ir.Model) -> None:
    _set(model, "growth", 0.0)


def without_magnitude(model: ir.Model) -> None:
    _set(model, "magnitude", 1.0)


def _set(model: ir.Model, name: str, value: float) -> None:
    for node in model.graph:
        if node.op_type == "CachedAttention":
            assert node.attributes[name].as_float() != value
            node.attributes[name] = ir.AttrFloat32(name, value)


def norm_before_rope(model: ir.Model) -> None:
    """Each norm reads what is not rotated yet, and the rotation reads the norm."""
    for node in [node for node in model.graph if node.op_type == "RotatedHeads"]:
        split = next(user for user, _ in node.outputs[0].uses())
        norm = next(user for user, _ in split.outputs[0].uses())
        merge = next(user for user, _ in norm.outputs[0].uses())
        (attention, index) = next(iter(merge.outputs[0].uses()))
        split.replace_input_with(0, node.inputs[0])
        node.replace_input_with(0, merge.outputs[0])
        attention.replace_input_with(index, node.outputs[0])
    model.graph.sort()


def factors_of_short_texts(model: ir.Model) -> None:
    value = model.graph.initializers["rotary_emb.0.long_inv_freq"]
    plain = 10000 ** -(np.arange(8, dtype=np.float32) / 8)
    assert not np.allclose(value.const_value.numpy(), plain)
    value.const_value = ir.tensor(plain, name=value.name)


def heads_rotated_whole(model: ir.Model) -> None:
    for value in (model.graph.initializers[f"rotary_emb.0.{name}inv_freq"] for name in ("", "long_")):
        widened = np.repeat(value.const_value.numpy(), 2)
        value.const_value = ir.tensor(widened, name=value.name)
        value.shape = ir.Shape(widened.shape)
    for node in model.graph:
        if node.op_type == "CachedAttention":
            node.attributes["rotary_dim"] = ir.AttrInt64("rotary_dim", 2 * widened.size)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("ernie4_5-interleaved-rope-biases", turned_otherwise),
        ("phi3-packed-window-fp16", turned_otherwise),
        ("phi3-packed-window-fp16", heads_rotated_whole),
        ("phi3-packed-window-fp16", without_magnitude),
        ("phi3-packed-window-fp16", factors_of_short_texts),
        ("gemma2-softcaps", without_softcap),
        ("hunyuan-norm-after-rope", norm_before_rope),
        ("ministral3-growing-queries", without_growth),
    ],
)
def test_an_attention_without_its_knob_exceeds_the_tolerance(exported, onnxruntime_run, tmp_path, name, plant):
    assert_exceeds(exported(name), onnxruntime_run, tmp_path, plant)


@pytest.mark.parametrize("plant", [window_off_by_one, frequencies_off_by_a_thousandth, epsilon_off, residual_left_out])
@pytest.mark.parametrize("name", ["mistral-window-wide-heads", "invented"])
def test_a_planted_error_exceeds_the_tolerance(exported, onnxruntime_run, tmp_path, name, plant):
    assert_exceeds(exported(name), onnxruntime_run, tmp_path, plant)


def norm_weights_less_one(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "RMSNormalization":
            value = node.inputs[1]
            weight = value.const_value.numpy() - np.float32(1)
            value.const_value = ir.tensor(weight, name=value.name)


def exact_gelu(model: ir.Model) -> None:
    for node in model.graph:
        node.attributes.pop("approximate", None)


def means_not_subtracted(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "LayerNormalization":
            node.op_type = "RMSNormalization"
            node.resize_inputs(2)


def norm_biases_left_out(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "LayerNormalization":
            node.resize_inputs(2)


def one_after_the_other(model: ir.Model) -> None:
    """The MLP reads what attention has been added to, as in most decoders."""
    nodes = {node.name: node for node in model.graph}
    nodes["model.layers.1.post_attention_layernorm"].replace_input_with(0, nodes["model.layers.1.residual"].outputs[0])


def left_out(name: str) -> Callable[[ir.Model], None]:
    """A plant: the node ``name`` hands on what it reads."""

    def plant(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.name == name)
        for user, index in tuple(node.outputs[0].uses()):
            user.replace_input_with(index, node.inputs[0])
        if node.outputs[0].is_graph_output():
            identity = ir.node("Identity", [node.inputs[0]])
            node.graph.insert_after(node, identity)
            identity.outputs[0].name, node.outputs[0].name = node.outputs[0].name, "other"
            node.graph.outputs[node.graph.outputs.index(node.outputs[0])] = identity.outputs[0]

    plant.__name__ = f"{name} left out"
    return plant


def values_as_keys(model: ir.Model) -> None:
    """Layers without keys of their own read values in their place."""
    for node in model.graph:
        if node.op_type == "SharedAttention":
            node.replace_input_with(1, node.inputs[2])


def experts_of_all_groups(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Where":
            node.replace_input_with(2, node.inputs[1])


# Each knob of norms, their places, activations and scalars, dropped.
DROPPED = [
    ("gemma-bf16", norm_weights_less_one),
    ("gemma-bf16", exact_gelu),
    ("gemma-bf16", left_out("embedding_scale.mul")),
    ("olmo2-norms-behind", left_out("model.layers.1.self_attn.k_norm")),
    ("olmo2-norms-behind", left_out("model.layers.1.post_feedforward_layernorm")),
    ("glm4-sandwich", left_out("model.layers.0.post_self_attn_layernorm")),
    ("starcoder2-window-fp16", means_not_subtracted),
    ("starcoder2-window-fp16", norm_biases_left_out),
    ("cohere-parallel", left_out("logit_scale.mul")),
    ("cohere-norms-of-each-head-bf16", left_out("model.layers.1.self_attn.mul_1")),
    ("cohere-norms-of-each-head-bf16", left_out("model.layers.0.self_attn.q_norm")),
    ("gpt_neox-two-norms", one_after_the_other),
    ("phi-head-bias-fp16", left_out("lm_head.bias")),
    ("gpt2-scale-by-layer", left_out("residual")),
    ("invented", left_out("logit_softcap.tanh")),
    ("gemma4-keys-are-values", left_out("model.layers.1.self_attn.v_norm")),
    ("gemma4-keys-are-values", left_out("model.layers.0.mul")),
    ("gemma4-experts-beside-mlp", left_out("model.layers.0.experts.router_norm")),
    ("gemma4-experts-beside-mlp", left_out("model.layers.1.experts.mul")),
    ("gemma4-experts-beside-mlp", left_out("model.layers.1.post_feedforward_layernorm_1")),
    ("gemma4-shared-caches-per-layer-inputs", left_out("model.layers.4.post_per_layer_input_norm")),
    ("gemma4-shared-caches-per-layer-inputs", left_out("model.per_layer_projection_norm")),
    ("gemma4-shared-caches-per-layer-inputs", values_as_keys),
    ("falcon_h1-both-mixers-multipliers", left_out("model.layers.0.attention_scale.mul")),
    ("falcon_h1-both-mixers-multipliers", left_out("model.layers.1.recurrent.step_scale.mul")),
    ("falcon_h1-both-mixers-multipliers", left_out("model.layers.1.mlp.gate_scale.mul")),
    ("nemotron_h-one-part-per-layer", left_out("model.layers.0.recurrent.clip")),
    ("deepseek_v2-latent-keys-grouped-experts", left_out("model.layers.1.self_attn.kv_a_norm")),
    ("deepseek_v2-latent-keys-grouped-experts", experts_of_all_groups),
    ("deepseek_v3-latent-queries-corrected-groups", left_out("model.layers.0.self_attn.q_a_norm")),
    ("deepseek_v3-latent-queries-corrected-groups", experts_of_all_groups),
]


@pytest.mark.parametrize(("name", "plant"), DROPPED, ids=lambda value: getattr(value, "__name__", value))
def test_a_dropped_knob_exceeds_the_tolerance(exported, onnxruntime_run, tmp_path, name, plant):
    assert_exceeds(exported(name), onnxruntime_run, tmp_path, plant)


def assert_exceeds(case, onnxruntime_run, folder: Path, plant: Callable[[ir.Model], None]) -> None:
    model = ir.load(case.export / "decoder.onnx")
    plant(model)
    for file in ("model.safetensors", MADE_FILE):
        if (case.export / file).exists():
            os.link(case.export / file, folder / file)
    ir.save(model, folder / "decoder.onnx")
    ids = random_ids()
    logits = logits_in_pieces(onnxruntime_run(folder), read_export(case.export).geometry, ids, [TOKENS])
    assert difference(logits, case.reference(ids)) > LOGIT_TOLERANCE


def give_frequencies(**sources: str) -> Callable[[ir.Model], None]:
    """A plant: the attention of layer ``l0`` etc. reads the frequencies called ``sources``."""

    def plant(model: ir.Model) -> None:
        tables = {name: value for name, value in model.graph.initializers.items() if name.endswith("inv_freq")}
        for layer, source in sources.items():
            node = next(node for node in model.graph if node.name == f"model.layers.{layer[1:]}.self_attn")
            node.replace_input_with(6, tables[source])

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        give_frequencies(l0="rotary_emb.1.inv_freq", l3="rotary_emb.0.inv_freq"),
        give_frequencies(l3="rotary_emb.0.inv_freq"),
        give_frequencies(l2="rotary_emb.0.inv_freq"),
        give_frequencies(l0="model.layers.2.self_attn.rotary_emb.inv_freq"),
    ],
    ids=["swapped", "the first one's for all", "where positions are not encoded", "none"],
)
def test_another_ropes_table_exceeds_the_tolerance(invented_case, onnxruntime_run, tmp_path, plant):
    assert_exceeds(invented_case, onnxruntime_run, tmp_path, plant)


@pytest.mark.parametrize("sources", [{"l0": 0, "l1": 1}, {"l0": 0}, {"l1": 1}], ids=["swapped", "full", "windowed"])
def test_the_rope_of_the_other_layers_exceeds_the_tolerance(exported, onnxruntime_run, tmp_path, sources):
    plant = give_frequencies(**{layer: f"rotary_emb.{rope}.inv_freq" for layer, rope in sources.items()})
    assert_exceeds(exported("gemma3-two-ropes"), onnxruntime_run, tmp_path, plant)
