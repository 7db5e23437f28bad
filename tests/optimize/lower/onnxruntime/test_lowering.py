"""The lowered graph computes what the portable graph computes, however the tokens are fed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference, portable, relative_difference, varied
from doubles.tiny import BASE, tiny

from llmc.export import export
from llmc.optimize.lower.context import PerToken, WeightOnly
from llmc.optimize.quantize.grid import Grid

# Largest absolute difference of logits (up to 9) in float32. Both sides sum in different orders, which costs up to
# 1.5e-5; a wrong window, position, scale or epsilon costs more than 1e-3.
FLOAT_TOLERANCE = 1e-4
# Root mean square of the difference over that of the logits, where activations are rounded to 8 bits: two layers of
# random weights, whose attention is nearly a choice of one position, turn that into 2 to 5 %, those of gemma, whose
# norms' weights are one larger, into 5 to 11 % (12 prompts). A wrong block, scale or token costs more than 70 %.
ROUNDING_TOLERANCE = 0.15

CAPPED = "gemma2-softcaps"
TOKENS = 20
PIECES = {"one piece": [TOKENS], "chunks": [7, 1, 12], "token by token": [1] * TOKENS}
GRIDS = {"8 bits": Grid(8, 32), "4 bits": Grid(4, 32), "blocks wider than the rows": Grid(4, 128)}


def test_float32_equals_the_portable_graph(case, lowering, decoder, portable_logits, ids):
    lowered = lowering(case.export)
    run = decoder(lowered.save(), lowered.geometry)
    for pieces in PIECES.values():
        assert difference(run(ids, pieces), portable_logits(case)) <= FLOAT_TOLERANCE


LATENT = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 20.0, "original_max_position_embeddings": 6}
MISTRAL4 = {
    **BASE,
    **LATENT,
    "model_type": "mistral4",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "rope_parameters": {**ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}


def test_queries_of_which_a_part_is_rotated_grow_whole(tmp_path, lowering, decoder, portable_logits, ids):
    parts = {"text_config": MISTRAL4, "vision_config": {**SIGHT, "model_type": "pixtral"}, "image_token_index": 95}
    tiny(tmp_path / "checkpoint", "mistral3", "AutoModelForImageTextToText", **parts)
    export(tmp_path / "checkpoint", tmp_path / "export", text_only=True)
    case = SimpleNamespace(name="mistral4", export=tmp_path / "export")
    lowered = lowering(case.export)
    assert (
        difference(decoder(lowered.save(), lowered.geometry)(ids, [7, 1, 12]), portable_logits(case)) <= FLOAT_TOLERANCE
    )


@varied
def test_rows_of_a_ragged_decode_batch_are_as_alone(case, lowering, decoder, ids):
    lowered = lowering(case.export, WeightOnly(Grid(4, 32)))
    decode = decoder(lowered.save(), lowered.geometry)
    prompts = [ids[:9], ids[9:13]]
    caches = [decode.run([prompt], [0], decode.empty_cache())[1] for prompt in prompts]
    alone = [decode.run([[5]], [len(prompt)], cache)[0][0] for prompt, cache in zip(prompts, caches, strict=True)]
    both = {name: np.concatenate([cache[name] for cache in caches]) for name in caches[0]}
    together, _ = decode.run([[5], [5]], [9, 4], both)
    assert difference(together, np.stack(alone)) <= FLOAT_TOLERANCE


def window_off_by_one(lowered) -> None:
    for node in lowered.nodes("GroupQueryAttention"):
        window = node.attributes["local_window_size"].as_int()
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window + 1)


def scale_off_by_a_hundredth(lowered) -> None:
    for node in lowered.nodes("GroupQueryAttention"):
        scale = node.attributes["scale"].as_float()
        node.attributes["scale"] = ir.AttrFloat32("scale", scale * 1.01)


def tables_swapped(lowered) -> None:
    for node in lowered.nodes("GroupQueryAttention"):
        cos, sin = node.inputs[7:9]
        node.replace_input_with(7, sin)
        node.replace_input_with(8, cos)


def epsilon_off(lowered) -> None:
    for node in lowered.nodes("SimplifiedLayerNormalization"):
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


def activation_off(lowered) -> None:
    for node in lowered.nodes("QuickGelu"):
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.01)


FLOAT_ERRORS = [window_off_by_one, scale_off_by_a_hundredth, tables_swapped, epsilon_off, activation_off]


@pytest.mark.parametrize("plant", FLOAT_ERRORS)
def test_a_planted_error_exceeds_the_float_tolerance(exported, lowering, decoder, portable_logits, ids, plant):
    case = exported("mistral-window-wide-heads")
    lowered = lowering(case.export)
    lowered.apply("remove dead nodes")
    plant(lowered)
    assert difference(decoder(lowered.write(), lowered.geometry)(ids), portable_logits(case)) > FLOAT_TOLERANCE


def test_softcaps_of_decode_equal_the_portable_graph(exported, lowering, decoder, portable_logits, ids):
    case = exported(CAPPED)
    lowered = lowering(case.export)
    lowered.context = replace(lowered.context, phase="decode")
    logits = decoder(lowered.save(), lowered.geometry)(ids, PIECES["token by token"])
    assert difference(logits, portable_logits(case)) <= FLOAT_TOLERANCE


def softcap_left_out(lowered) -> None:
    for node in lowered.nodes("Tanh"):
        if ".self_attn" in node.name:
            node.op_type = "Identity"


def window_of_basic_attention_off_by_one(lowered) -> None:
    for node in lowered.nodes("Greater"):
        node.op_type = "GreaterOrEqual"


def heads_of_the_cache_exchanged(lowered) -> None:
    value = lowered.nodes("ScatterND")[0].inputs[1].producer().inputs[1].producer().inputs[1]
    value.const_value = ir.tensor(value.const_value.numpy()[:, ::-1].copy(), name=value.name)


BASIC_ERRORS = [softcap_left_out, window_of_basic_attention_off_by_one, heads_of_the_cache_exchanged]


@pytest.mark.parametrize("plant", BASIC_ERRORS)
def test_a_planted_error_in_basic_attention_exceeds_the_float_tolerance(
    exported, lowering, decoder, portable_logits, ids, plant
):
    case = exported(CAPPED)
    lowered = lowering(case.export)
    lowered.apply("remove dead nodes")
    plant(lowered)
    logits = decoder(lowered.write(), lowered.geometry)(ids, PIECES["chunks"])
    assert difference(logits, portable_logits(case)) > FLOAT_TOLERANCE


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-sharded", "mistral-window-wide-heads"])
def test_blocked_weights_equal_the_portable_graph_on_what_they_stand_for(
    exported, lowering, decoder, ids, tmp_path, name, grid
):
    lowered = lowering(exported(name).export, WeightOnly(grid))
    lowered.apply("remove dead nodes")
    wanted = decoder(portable(lowered, tmp_path / "portable"), lowered.geometry)(ids)
    rounded = decoder(lowered.write(), lowered.geometry)(ids, PIECES["chunks"])
    assert relative_difference(rounded, wanted) <= ROUNDING_TOLERANCE
    lowered.exact()
    exact = decoder(lowered.write(), lowered.geometry)(ids, PIECES["chunks"])
    assert difference(exact, wanted) <= FLOAT_TOLERANCE


@varied
def test_weights_per_token_equal_the_portable_graph_up_to_rounding(case, lowering, decoder, ids, tmp_path):
    lowered = lowering(case.export, PerToken())
    logits = decoder(lowered.save(), lowered.geometry)(ids, PIECES["chunks"])
    wanted = decoder(portable(lowered, tmp_path / "portable"), lowered.geometry)(ids)
    assert relative_difference(logits, wanted) <= ROUNDING_TOLERANCE


def blocks_rolled(lowered) -> None:
    """The scales of the first down projection move on by one block."""
    name = next(name for name in lowered.graph.initializers if "layers.0.mlp.down" in name and "scales" in name)
    scales = lowered.graph.initializers[name]
    scales.const_value = ir.tensor(np.roll(scales.const_value.numpy(), 1), name=scales.name)


def head_reads_another_row(lowered) -> None:
    weight = lowered.node(lowered.nodes("MatMulNBits")[-1].name).inputs[1]
    weight.const_value = ir.tensor(np.roll(weight.const_value.numpy(), 1, axis=0), name=weight.name)


def token_scale_left_out(lowered) -> None:
    product = lowered.nodes("MatMulIntegerToFloat")[-1]
    scaling = next(node for node, _ in product.outputs[0].uses())
    scaling.outputs[0].replace_all_uses_with(product.outputs[0])


ROUNDING_ERRORS = [
    (WeightOnly(Grid(8, 32)), blocks_rolled),
    (WeightOnly(Grid(4, 32)), blocks_rolled),
    (WeightOnly(Grid(4, 128)), head_reads_another_row),
    (PerToken(), blocks_rolled),
    (PerToken(), token_scale_left_out),
]


@pytest.mark.parametrize(("form", "plant"), ROUNDING_ERRORS)
def test_a_planted_error_exceeds_the_rounding_tolerance(exported, lowering, decoder, ids, tmp_path, form, plant):
    lowered = lowering(exported("qwen3-tied-sharded").export, form)
    lowered.apply("remove dead nodes")
    plant(lowered)
    wanted = portable(lowered, tmp_path / "portable")
    logits = decoder(lowered.write(), lowered.geometry)(ids)
    assert relative_difference(logits, decoder(wanted, lowered.geometry)(ids)) > ROUNDING_TOLERANCE
