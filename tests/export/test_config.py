"""config.json, strictly: real ones are read right, and what is not understood is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmc.errors import CheckpointError
from llmc.export.blocks.rope import inverse_frequencies
from llmc.export.config import DecoderConfig
from llmc.export.families import FAMILIES, read_config
from llmc.export.keys import Keys
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.rope import Rope

# What decides in config.json of published models; whole files are read in test_published.py.
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-06}
QWEN25_05B = {
    **COMMON, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    **COMMON, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA32_1B = {
    **COMMON, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA2_7B = {
    **COMMON, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_7B = {
    **LLAMA2_7B, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
SMOLLM3 = {
    **COMMON, "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536,
    "model_type": "smollm3", "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "rope_theta": 5000000.0, "vocab_size": 128256,
}  # fmt: skip
PHI3_MINI = {
    **LLAMA2_7B, "hidden_size": 3072, "intermediate_size": 8192, "model_type": "phi3", "attention_bias": False,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064,
}  # fmt: skip
# As the cards of Qwen2.5 and Qwen3 tell to add it.
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1 + i for i in range(64)],
}


def read(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return read_config(Keys({**values, **changes}, "config.json"))


def attention(values: dict[str, Any], **changes: Any) -> AttentionConfig:
    """That of the first layer."""
    return read(values, **changes).layers[0].attention


def windows(values: dict[str, Any], **changes: Any) -> tuple[int, ...]:
    return tuple(layer.attention.window for layer in read(values, **changes).layers)


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 123.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 300.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": None},
        {**LONGROPE, "original_max_position_embeddings": LLAMA2_7B["max_position_embeddings"]},
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0},
    ],
    ids=lambda rope: "-".join(rope["rope_type"].split()) + str(len(rope)),
)
def test_rope_types_give_the_frequencies_of_transformers(rope):
    assert_frequencies_equal({**without(LLAMA2_7B, "rope_scaling"), "rope_parameters": rope})
    assert_frequencies_equal(
        {**LLAMA2_7B, "rope_theta": rope["rope_theta"], "rope_scaling": without(rope, "rope_theta")}
    )


def assert_frequencies_equal(values: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reference = LlamaRotaryEmbedding(AutoConfig.for_model(**values)).inv_freq.numpy()
    found = inverse_frequencies(*read(values).ropes)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference, rtol=FREQUENCY_TOLERANCE)


# Both in float32; powers and the smooth blend round differently in the last bits.
FREQUENCY_TOLERANCE = 1e-6


def test_frequency_tolerance_can_fail():
    (rope,) = read(LLAMA32_1B).ropes
    other = replace(rope, theta=rope.theta * 1.0001)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(inverse_frequencies(other), inverse_frequencies(rope), rtol=FREQUENCY_TOLERANCE)


# What makes a model that is read of a family that by default has something else.
READ = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}, "scale_factor": 2},
    "mistral3": {"vision_config": {"model_type": "pixtral", "hidden_act": "silu"}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_asr": {"audio_config": {"output_dim": 2048}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
}


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"Dream", "llada"}))  # whose code is not transformers' own
def test_every_family_reads_what_transformers_saves_for_it(name):
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **READ.get(name, {}))
    found = read(without(config.to_dict(), "tie_word_embeddings"))  # published configs leave out what is the default
    assert (found.model_type, found.tied_head) == (name, getattr(config, "tie_word_embeddings", False))


def test_windows_follow_layer_types_or_the_first_windowed_layer():
    on = {"use_sliding_window": True, "sliding_window": 128, "num_hidden_layers": 4}
    assert windows(QWEN25_05B, **on, max_window_layers=3) == (0, 0, 0, 128)
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(QWEN3_06B, **on, layer_types=types) == (128, 0, 0, 128)
    assert windows(QWEN3_06B, layer_types=["full_attention"] * 28) == (0,) * 28
    assert windows(MISTRAL_7B, sliding_window=None) == (0,) * 32


def test_absent_keys_mean_what_transformers_takes_them_for():
    assert attention(without(LLAMA2_7B, "num_key_value_heads")).kv_heads == 32
    assert attention(without(QWEN3_06B, "head_dim")).head_dim == 128
    assert read(without(LLAMA32_1B, "rope_theta", "rope_scaling")).ropes == (Rope(64, 10000.0),)
    mixtral = {**MISTRAL_7B, "model_type": "mixtral", "num_experts_per_tok": 2}
    assert read(without(mixtral, "rope_theta")).ropes == (Rope(128, 1e6),)
    assert not read(without(LLAMA32_1B, "tie_word_embeddings")).tied_head


@pytest.mark.parametrize(
    "changes", [{}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"factor": 0.5}]
)
def test_the_magnitude_of_yarn_is_that_of_transformers(changes):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {**without(LLAMA2_7B, "rope_scaling"), "rope_parameters": {**YARN, **changes}}
    reference = LlamaRotaryEmbedding(AutoConfig.for_model(**values)).attention_scaling
    assert read(values).ropes[0].magnitude == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"factor": 3.0}, {"factor": 0.5}, {"attention_factor": 1.5}])
def test_longrope_is_that_of_transformers_for_texts_on_both_sides_of_the_original_positions(changes):
    import torch
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {**LONGROPE, "original_max_position_embeddings": 32, **changes}
    values = {**without(LLAMA2_7B, "rope_scaling"), "rope_parameters": rope}
    reference = LlamaRotaryEmbedding(AutoConfig.for_model(**values))
    (found,) = read(values).ropes
    assert found.magnitude == pytest.approx(reference.attention_scaling, rel=1e-12)
    for length, long in ((32, False), (33, True)):
        reference(torch.zeros(1), torch.arange(length)[None])
        frequencies = inverse_frequencies(found, long=long)
        np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=FREQUENCY_TOLERANCE)


def test_a_context_within_the_original_positions_has_the_factors_of_short_texts_alone():
    rope = {**LONGROPE, "original_max_position_embeddings": 32, "factor": 128.0}
    values = {**without(LLAMA2_7B, "rope_scaling"), "rope_parameters": rope}
    both, short = read(values), read(values, max_position_embeddings=32)
    factors = [tuple(LONGROPE[name]) for name in ("short_factor", "long_factor")]
    assert [both.ropes[0].factors, both.ropes[0].long_factors] == factors
    assert (short.ropes[0].factors, short.ropes[0].long_factors) == (factors[0], ())
    assert (both.geometry.long_after, short.geometry.long_after) == (32, 0)


def test_windowed_layers_may_have_a_rope_of_their_own():
    """Gemma 3 as it was published first, and as transformers 5 saves it; olmo3 has one base for both kinds."""
    first = {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    }  # fmt: skip
    found = read(first, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert found.ropes == (Rope(256, 1e6, "linear", 8.0), Rope(256, 1e4))
    assert [layer.attention.rope for layer in found.layers[:7]] == [1, 1, 1, 1, 1, 0, 1]
    assert [layer.attention.window for layer in found.layers[:7]] == [512, 512, 512, 512, 512, 0, 512]
    later = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    again = without(first, "rope_local_base_freq", "rope_scaling", "rope_theta")
    assert read(again, rope_parameters=later) == found
    with pytest.raises(CheckpointError, match=r"rope_theta=1000000.0.* the same as in full_attention \(5.0\)"):
        read(again, rope_theta=1000000.0, rope_parameters={"full_attention": {"rope_theta": 5.0}})


def test_yarn_extends_the_context_where_the_config_still_says_the_original_one():
    keys = Keys({**QWEN25_05B, "rope_scaling": {**YARN, "attn_factor": 0.878}}, "config.json")
    assert read_config(keys).max_positions == 131_072
    assert keys.notes == [
        "config.json: attn_factor=0.878 was left out, as transformers does",
        "config.json: yarn extends max_position_embeddings=32768 by 4, to 131072 positions",
    ]
    assert read(QWEN25_05B, max_position_embeddings=131_072, rope_scaling=YARN).max_positions == 131_072


def test_a_ministral_3_without_a_beta_has_queries_that_do_not_grow():
    """transformers fails there; vLLM and llama.cpp compute them so."""
    from transformers import AutoConfig

    values = AutoConfig.for_model("ministral3").to_dict()
    for left, growth in (((), 0.1), (("llama_4_scaling_beta",), 0.0)):
        config = read({**values, "rope_parameters": without(values["rope_parameters"], *left)})
        assert {layer.attention.query_growth for layer in config.layers} == {growth}


GEMMA4_26B = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 16, "topk_group": 2}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob=True", "expected false"]),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method='noaux_tc'", "group_limited_greedy"]),
        ("deepseek_v2", {"v_head_dim": 256}, ["v_head_dim=256", "at most 192"]),
        ("deepseek_v2", {**LIMITED, "n_group": 3}, ["n_group=3", "a divisor of num_experts=64"]),
        ("deepseek_v2", {**LIMITED, "topk_group": 1}, ["topk_group=1", "with 6 experts or more"]),
        ("falcon_h1", {"mlp_bias": True}, ["mlp_bias=True", "expected false"]),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, ["ssm_multipliers=[1.0]", "5 numbers"]),
        ("olmo3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, ["truncate=False", "true"]),
        ("granite_swa", {"layer_rope_theta": [0.5] * 24}, ["layer_rope_theta=", "24 numbers, each 0 or from 1"]),
        ("granitemoehybrid", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "one of silu"]),
        ("granitemoehybrid", {"layer_types": 2}, ["layer_types=2", "32 entries"]),
        ("qwen3_5_text", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "one of silu"]),
        ("nemotron_h", {"conv_kernel": float("nan")}, ["conv_kernel=nan", "a whole number"]),
        ("granitemoehybrid", {"mamba_n_groups": 3}, ["mamba_n_groups=3", "a divisor of mamba_n_heads=128"]),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, ["layers_block_type=", "not rwkv"]),
        ("nemotron_h", {"layers_block_type": "M*"}, ["layers_block_type='M*'", "expected a list"]),
        ("nemotron_h", {"moe_latent_size": "64"}, ["moe_latent_size='64'", "a whole number"]),
        ("nemotron_h", {"hybrid_override_pattern": "M-"}, ["layers_block_type=", "hybrid_override_pattern='M-'"]),
        ("nemotron_h", {"num_hidden_layers": 3}, ["num_hidden_layers=3", "expected 4, the layers"]),
        ("nemotron_h", {"use_bias": True}, ["use_bias=True", "mamba_proj_bias=False"]),
        ("phi", {"tie_word_embeddings": True}, ["tie_word_embeddings=True", "the head adds a bias"]),
        ("gemma", {"hidden_activation": "gelu"}, ["hidden_activation='gelu'", "gelu_pytorch_tanh"]),
        ("gemma4_text", GEMMA4_26B | {"top_k_experts": 129}, ["top_k_experts=129", "at most num_experts=128"]),
        ("gemma4_text", GEMMA4_26B | {"hidden_activation": "silu"}, ["hidden_activation='silu'"]),
        ("gemma4_text", {"num_kv_shared_layers": 29}, ["num_kv_shared_layers=29", "a layer of each kind"]),
        ("gemma4_text", {"rope_parameters": {"sliding_attention": {}}}, ["rope_parameters=", "full_attention and"]),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 64}}}, ["per_layer_config=", "and for no other"]),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention='all'"]),
        ("gpt2", {"n_embd": "768"}, ["n_embd='768'", "a whole number"]),
        (
            "gpt_neox",
            {"rotary_pct": 0.2, "partial_rotary_factor": 0.3},
            ["rotary_pct=0.2", "partial_rotary_factor=0.3"],
        ),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_its_own_key(family, changes, words):
    from transformers import AutoConfig

    saved = AutoConfig.for_model(family, **READ.get(family, {})).to_dict()
    test_what_is_not_understood_is_refused_by_name(saved, changes, words)


def test_gelu_is_what_transformers_takes_it_for():
    from transformers import AutoConfig

    def activation(family: str, name: str) -> str:
        return read(AutoConfig.for_model(family).to_dict(), hidden_act=name).layers[0].mlp.activation

    assert activation("gemma", "gelu") == "gelu_tanh"
    assert [activation("gpt_neox", name) for name in ("gelu", "gelu_fast")] == ["gelu", "gelu_tanh"]


def test_layers_without_positions_follow_the_list_or_the_interval():
    ropes = [layer.attention.rope for layer in read(SMOLLM3).layers]
    assert ropes[:8] == [0, 0, 0, None, 0, 0, 0, None]
    assert read(SMOLLM3).tied_head and read(without(SMOLLM3, "rope_theta")).ropes == (Rope(128, 2_000_000.0),)
    stated = read(SMOLLM3, no_rope_layers=[0] + [1] * 35, use_sliding_window=True, sliding_window=64)
    assert [layer.attention.rope for layer in stated.layers] == [None] + [0] * 35
    assert [layer.attention.window for layer in stated.layers] == [64] + [0] * 35


# Of Qwen2.5-7B-Instruct-1M: from 262,144 positions on, vLLM computes in chunks what is not plain attention any more.
DUAL_CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


def test_dual_chunk_attention_ends_the_positions_where_it_would_begin():
    keys = Keys(
        {**QWEN25_05B, "max_position_embeddings": 1_010_000, "dual_chunk_attention_config": DUAL_CHUNKS}, "config.json"
    )
    assert read_config(keys) == read(QWEN25_05B, max_position_embeddings=262_144)
    assert keys.notes == [
        "config.json: dual_chunk_attention_config is not supported and was left out: the context ends at 262144 "
        "positions instead of max_position_embeddings=1010000"
    ]
    assert read(QWEN25_05B, dual_chunk_attention_config=DUAL_CHUNKS).max_positions == 32_768


def test_a_part_of_each_head_may_be_rotated():
    """Phi-4-mini's three quarters, said at the top or inside of the rope."""
    outside = read(PHI3_MINI, partial_rotary_factor=0.75)
    assert outside.ropes == (Rope(72, 10000.0),)
    assert read(PHI3_MINI, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}) == outside
    assert outside.geometry.attentions[0].rotary_dim == 72


WRONG_TYPES = ["sliding_attention"] * 24
REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (LLAMA2_7B, {"model_type": "bloom"}, ["model_type='bloom'", "this one would take ALiBi"]),
    (LLAMA2_7B, {"model_type": "lama"}, ["model_type='lama'", "similar names are llama"]),
    (LLAMA2_7B, {"model_type": "own"}, ["model_type='own'", f"expected one of {', '.join(FAMILIES)}"]),
    (LLAMA2_7B, {"hidden_act": "xielu"}, ["hidden_act='xielu'", "expected one of silu, gelu"]),
    (LLAMA2_7B, {"attention_multiplier": 0.5}, ["attention_multiplier=0.5", "not known to llmc"]),
    (LLAMA2_7B, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "expected 1"]),
    (LLAMA2_7B, {"is_causal": False}, ["is_causal=False", "expected True"]),
    (LLAMA2_7B, {"rope_scaling": {"type": "ntk"}}, ["type='ntk'", "default, linear, dynamic, llama3, yarn, longrope"]),
    (
        LLAMA2_7B,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0]}},
        ["long_factor=[0]", "a list of numbers from 0.001"],
    ),
    (
        LLAMA2_7B,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        ["rope_scaling: short_factor=1", "expected 64 numbers, one for each rotated pair"],
    ),
    (
        LLAMA2_7B,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1}},
        ["beta_fast=1", "more than beta_slow=1"],
    ),
    (PHI3_MINI, {"rope_scaling": {"type": "linear"}}, ["type='linear'", "expected one of default, longrope, su, yarn"]),
    (
        PHI3_MINI,
        {"partial_rotary_factor": 0.01},
        ["partial_rotary_factor=0.01", "even number of values of head_dim=96"],
    ),
    (
        PHI3_MINI,
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        ["partial_rotary_factor=0.5", "the same as in config.json: rope_parameters (0.25)"],
    ),
    (PHI3_MINI, {"attention_bias": True}, ["attention_bias=True", "expected false"]),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, ["no_rope_layers=[1, 0]", "36 entries, each 1 (rotates) or 0"]),
    (LLAMA2_7B, {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, ["rope_scaling: beta=1", "not known"]),
    (LLAMA2_7B, {"rope_scaling": "linear"}, ["rope_scaling='linear'", "an object"]),
    (LLAMA2_7B, {"rope_scaling": []}, ["rope_scaling=[]", "an object"]),
    (
        LLAMA32_1B,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        ["rope_scaling=", "the same as rope_parameters"],
    ),
    (
        {**LLAMA2_7B, "rope_theta": 10000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        ["rope_theta=10000.0", "the same as in rope_parameters (5.0)"],
    ),
    (
        LLAMA32_1B,
        {"rope_scaling": {**LLAMA32_1B["rope_scaling"], "high_freq_factor": 1.0}},  # type: ignore[dict-item]
        ["high_freq_factor=1.0", "more than low_freq_factor=1.0"],
    ),
    (LLAMA2_7B, {"num_key_value_heads": 5}, ["num_key_value_heads=5", "a divisor of num_attention_heads=32"]),
    (LLAMA2_7B, {"hidden_size": 4097}, ["head_dim is missing", "whole number"]),
    (LLAMA2_7B, {"head_dim": 33}, ["head_dim=33", "an even number"]),
    (LLAMA2_7B, {"vocab_size": "32000"}, ["vocab_size='32000'", "whole number"]),
    (LLAMA2_7B, {"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan", "a number from 1e-30 to 1"]),
    (LLAMA2_7B, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "true or false"]),
    (LLAMA2_7B, {"eos_token_id": -1}, ["eos_token_id=-1", "a token id"]),
    (LLAMA2_7B, {"eos_token_id": [1, "2"]}, ["eos_token_id=[1, '2']", "a token id"]),
    (QWEN25_05B, {"layer_types": WRONG_TYPES}, ["layer_types=", "24 entries", "full_attention"]),
    (QWEN25_05B, {"use_sliding_window": 1}, ["use_sliding_window=1", "true or false"]),
    (QWEN25_05B, {"dual_chunk_attention_config": {}}, ["original_max_position_embeddings is missing", "whole number"]),
    (
        QWEN25_05B,
        {"dual_chunk_attention_config": {**DUAL_CHUNKS, "local_value": 1}},
        ["dual_chunk_attention_config: local_value=1", "not known"],
    ),
    (QWEN25_05B, {"use_mrope": True}, ["use_mrope=True", "expected False"]),
]


@pytest.mark.parametrize(("values", "changes", "words"), REFUSED, ids=[f"{c}"[:50] for _, c, _ in REFUSED])
def test_what_is_not_understood_is_refused_by_name(values, changes, words):
    with pytest.raises(CheckpointError) as caught:
        read(values, **changes)
    for word in ["config.json: ", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["model_type", "hidden_size", "rms_norm_eps", "sliding_window"])
def test_a_missing_key_is_named(name):
    with pytest.raises(CheckpointError, match=rf"config.json: {name} is missing; expected"):
        read(without(MISTRAL_7B, name))
