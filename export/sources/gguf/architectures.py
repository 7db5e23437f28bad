"""Translate llama.cpp's architectures to ``config.json``.

llama.cpp's name of an architecture covers several of Hugging Face's families: ``llama`` is also Mistral, SmolLM and Yi,
``granite`` is Granite 4 without recurrent layers, ``olmo2`` is OLMo 3. The tensors show whether there are biases and an
untied head. Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py and src/models
"""

from collections.abc import Callable, Mapping
from typing import Any

from llmc.errors import CheckpointError
from llmc.export.sources.gguf import diffusion
from llmc.export.sources.gguf.config import (
    Metadata,
    check_width,
    head_dim,
    read_common,
    read_factors,
    read_rope,
    turned_values,
)

# A frequency divided by a factor this large never rotates.
ENDLESS = 1e30
GELU = "gelu_pytorch_tanh"
# Keys with one value per layer, or sizes that are not those of a head.
DIFFERING = {
    "gemma4": ("feed_forward_length", "attention.head_count_kv"),
    "deepseek2": ("attention.key_length", "attention.head_count_kv"),
}
# How expert scores become weights, by llama.cpp's numbers.
SCORES = {1: "softmax", 2: "sigmoid"}
# Sizes of recurrent layers; llama.cpp states the size of values for all heads together.
_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim",
}


def read_config(data: Metadata) -> dict[str, Any]:
    if data.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{data.where}: general.architecture={data.architecture!r:.80} is unsupported in GGUF files; expected one "
            f"of {', '.join(ARCHITECTURES)}; export the checkpoint that the file was converted from"
        )
    config = {
        "model_type": data.architecture,
        "hidden_act": "silu",
        **read_common(data, DIFFERING.get(data.architecture, ())),
    }
    config |= ARCHITECTURES[data.architecture](data, config)
    data.finish()
    return config


def _biased(data: Metadata, config: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    return {**read_rope(data, config, partial=partial), "attention_bias": data.has("attn_q.bias")}


def _llama(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_biased(data, config), "mlp_bias": data.has("ffn_gate.bias")}


def _mixtral(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(data, config), **_experts(data), "model_type": "mixtral", "sliding_window": None}


def _experts(data: Metadata, score: str = "softmax") -> dict[str, Any]:
    stated = SCORES.get(data.get("expert_gating_func", 1))
    if stated != score:
        raise data.error("expert_gating_func", str(data.get("expert_gating_func")), f"that of {score}")
    return {
        "num_experts": data.get("expert_count"),
        "num_experts_per_tok": data.get("expert_used_count"),
        "moe_intermediate_size": data.get("expert_feed_forward_length"),
    }


def _lfm2_moe(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(data, config),
        **_experts(data, "sigmoid"),
        "model_type": "lfm2_moe",
        "block_auto_adjust_ff_dim": None,
        "num_dense_layers": data.get("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in data.shapes),
        "routed_scaling_factor": data.get("expert_weights_scale", 1.0),
    }


def _phi3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Only a part of each head is rotated. Factors for long contexts are in tensors."""
    window, turned = data.get("attention.sliding_window", 0), turned_values(data, config)
    original = data.get("rope.scaling.original_context_length", config.get("max_position_embeddings"))
    values = {
        "partial_rotary_factor": turned / head_dim(config),
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
    }
    magnitude = data.get("rope.scaling.attn_factor")
    kinds = [kind for kind in ("short", "long") if f"rope_factors_{kind}.weight" in data.shapes]
    if kinds:
        factors = {f"{kind}_factor": read_factors(data, f"rope_factors_{kind}.weight", turned // 2) for kind in kinds}
        stated = {} if magnitude is None else {"attention_factor": magnitude}
        values["rope_scaling"] = {"rope_type": "longrope", **factors, **stated}
    return values


def _gemma_scalar(config: Mapping[str, Any], layers: int) -> int:
    """Divisor of queries, squared: the head's width, or hidden_size / heads in the 27B model (by its layers)."""
    return head_dim({**config, "head_dim": None} if config.get("num_hidden_layers") == layers else config)


def _gemma3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Two ropes; every sixth layer has full attention, and only its rope is scaled."""
    return {
        **read_rope(data, config),
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": GELU,
        "rope_theta": config.get("rope_theta", 1_000_000.0),
        "rope_local_base_freq": data.get("rope.freq_base_swa", 10_000.0),
        "sliding_window": data.get("attention.sliding_window"),
        "sliding_window_pattern": data.get("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": _gemma_scalar(config, 62),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
    }


def _gemma4(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Full-attention layers have another head size; only a part of it is rotated, the other factors are infinite."""
    windowed, shared = data.each("attention.sliding_window_pattern") or [], _size(data, "attention.shared_kv_layers", 0)
    full, width = [index for index, its in enumerate(windowed) if not its], data.get("attention.key_length_swa")
    heads, inner = data.of_layers("attention.head_count_kv"), data.of_layers("feed_forward_length")
    if inner != inner[:1] * (len(inner) - shared) + inner[-1:] * shared or inner[-1] not in (inner[0], 2 * inner[0]):
        raise data.error(
            "feed_forward_length", str(inner), f"one width, which may be doubled in the last {shared} layers"
        )
    for key, expected in (("attention.value_length_swa", width), ("rope.dimension_count_swa", width)):
        if data.get(key, expected) != expected:
            raise data.error(key, str(data.get(key)), f"the width of a head, {expected}")
    check_width(data, config, "rope.dimension_count")
    factors = [1.0]
    if "rope_freqs.weight" in data.shapes:
        factors = read_factors(data, "rope_freqs.weight", head_dim(config) // 2)
    turning = factors.count(1.0)
    if min(factors[turning:], default=ENDLESS) < ENDLESS:
        raise data.error("rope_freqs.weight", "of other factors", f"1, then {ENDLESS:g} and more")
    experts = {**_experts(data), "enable_moe_block": True} if data.get("expert_count") else {}
    return {
        **experts,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": turning / len(factors),
                "rope_theta": config.get("rope_theta", 1_000_000.0),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": data.get("rope.freq_base_swa", 10_000.0)},
        },
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": GELU,
        "layer_types": ["sliding_attention" if its else "full_attention" for its in windowed],
        "head_dim": width,
        "global_head_dim": config.get("head_dim"),
        "num_key_value_heads": next((heads[i] for i, its in enumerate(windowed) if its), heads[0]),
        "num_global_key_value_heads": heads[full[0]] if full else None,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in data.shapes,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "num_kv_shared_layers": shared,
        "sliding_window": data.get("attention.sliding_window"),
        "hidden_size_per_layer_input": data.get("embedding_length_per_layer_input") or 0,
        "final_logit_softcapping": data.get("final_logit_softcapping"),
    }


def _gemma2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **read_rope(data, config),
        "hidden_act": None,
        "hidden_activation": GELU,
        "sliding_window": data.get("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scalar(config, 46),
        "attn_logit_softcapping": data.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.get("final_logit_softcapping", 30.0),
    }


def _layer_norm(data: Metadata, key: str = "layer_norm_eps") -> dict[str, Any]:
    return {key: data.get("attention.layer_norm_epsilon")}


def _partial(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(data, config, partial=True), **_layer_norm(data)}


def _granite(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Converted Granite 4 keeps sizes of recurrent layers that it does not have."""
    data.skip(*_SIZES, "expert_shared_feed_forward_length")
    if not data.get("rope.scaling.finetuned", True):
        raise data.error("rope.scaling.finetuned", "False", "True, since layers without positions are not supported")
    return {**_llama(data, config), **_multipliers(data, config)}


def _multipliers(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": data.get("attention.scale", (head_dim(config) or 1) ** -0.5),
        "embedding_multiplier": data.get("embedding_scale"),
        "residual_multiplier": data.get("residual_scale"),
        "logits_scaling": data.get("logit_scale"),
    }


def _granite_hybrid(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without key heads is recurrent. Experts are as wide as the stated MLP width."""
    conv, state, groups, heads, inner = (_size(data, key) for key in _SIZES)
    hidden, experts = _size(data, "embedding_length"), _size(data, "expert_count", 0)
    if inner % hidden:
        raise data.error("ssm.inner_size", str(inner), f"a multiple of the model's width, {hidden}")
    return {
        **read_rope(data, config),
        **_multipliers(data, config),
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if count else "mamba" for count in data.of_layers("attention.head_count_kv")],
        "position_embedding_type": "rope" if data.get("rope.scaling.finetuned", True) else "nope",
        "num_experts": experts,
        "num_experts_per_tok": data.get("expert_used_count"),
        "shared_intermediate_size": data.get("expert_shared_feed_forward_length"),
        "mamba_d_conv": conv,
        "mamba_d_state": state,
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in data.shapes),
    }


def _falcon_h1(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The converter multiplies the weights by the checkpoint's multipliers."""
    sizes = _mamba(data)
    return {
        **read_rope(data, config),
        "model_type": "falcon_h1",
        "mamba_d_ssm": sizes["inner"],
        "mamba_n_heads": sizes["heads"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["conv"],
        "mamba_conv_bias": data.has("ssm_conv1d.bias"),
        "mamba_rms_norm": data.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba(data: Metadata) -> dict[str, int]:
    return dict(zip(("conv", "state", "groups", "heads", "inner"), (_size(data, key) for key in _SIZES), strict=True))


def _nemotron_h(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without key heads is an MLP or experts if its width is stated, else recurrent."""
    data.skip("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")  # positions are not encoded
    sizes, experts = _mamba(data), bool(data.get("expert_count"))
    further = _size(data, "nextn_predict_layers", 0)
    kinds = [
        "*" if heads else ("E" if experts else "-") if width else "M"
        for heads, width in zip(
            data.of_layers("attention.head_count_kv"), data.of_layers("feed_forward_length"), strict=True
        )
    ]
    kinds = kinds[: len(kinds) - further]
    values = {
        "model_type": "nemotron_h",
        "hidden_act": None,
        "rope_theta": None,
        "rms_norm_eps": None,
        "layer_norm_epsilon": data.get("attention.layer_norm_epsilon", config.get("rms_norm_eps")),
        "num_hidden_layers": len(kinds),
        "hybrid_override_pattern": "".join(kinds),
        "num_nextn_predict_layers": further,
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["inner"] // sizes["heads"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state"],
        "conv_kernel": sizes["conv"],
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in data.shapes),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in data.shapes),
        "attention_bias": any(name.endswith("attn_q.bias") for name in data.shapes),
    }
    if not experts:
        return values
    return {
        **values,
        **_grouped_experts(data, "sigmoid"),
        "moe_latent_size": data.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": data.get("expert_shared_feed_forward_length"),
    }


def _grouped_experts(data: Metadata, score: str) -> dict[str, Any]:
    stated = SCORES.get(data.get("expert_gating_func", 0), score)
    if stated != score:
        raise data.error("expert_gating_func", str(data.get("expert_gating_func")), f"that of {score}")
    return {
        "n_routed_experts": data.get("expert_count"),
        "n_shared_experts": data.get("expert_shared_count"),
        "num_experts_per_tok": data.get("expert_used_count"),
        "moe_intermediate_size": data.get("expert_feed_forward_length"),
        "norm_topk_prob": bool(data.get("expert_weights_norm", False)),
        "routed_scaling_factor": data.get("expert_weights_scale", 1.0),
        "n_group": data.get("expert_group_count", 1),
        "topk_group": data.get("expert_group_used_count", 1),
    }


# GLM-4.7-Flash's vocabulary: early files of it do not say that a sigmoid scores experts.
_GLM_FLASH = 154880


def _deepseek2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of keys and values before they are made of the latent vector; GLM-4.7-Flash is converted to it, too.

    Newer files split the matrix that makes both, and state the sizes of the heads that it makes as those of MLA."""
    turned, latent = _size(data, "rope.dimension_count"), _size(data, "attention.kv_lora_rank")
    split = any(name.endswith("attn_k_b.weight") for name in data.shapes)
    width = _size(data, "attention.key_length_mla" if split else "attention.key_length")
    data.skip("attention.key_length", "attention.value_length", "attention.head_count_kv")
    rope = read_rope(data, {**config, "head_dim": turned})
    if magnitude := data.get("rope.scaling.yarn_log_multiplier"):
        both = dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{magnitude * 10:.6g}"))
        rope["rope_scaling"] = {**rope.get("rope_scaling", {}), **both}
    glm, further = config["vocab_size"] == _GLM_FLASH, _size(data, "nextn_predict_layers", 0)
    score = SCORES.get(data.get("expert_gating_func", 2 if glm else 1), "softmax")
    experts, sigmoid = _grouped_experts(data, score), score == "sigmoid"
    limited = not sigmoid and experts["n_group"] != 1
    own = {"topk_method": "noaux_tc"} if sigmoid else {"topk_method": "group_limited_greedy" if limited else "greedy"}
    return {
        **rope,
        **experts,
        **own,
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_hidden_layers": _size(data, "block_count") - further,
        "num_nextn_predict_layers": further if sigmoid else None,
        "q_lora_rank": data.get("attention.q_lora_rank"),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": width - turned,
        "v_head_dim": _size(data, "attention.value_length_mla" if split else "attention.value_length"),
        "first_k_dense_replace": data.get("leading_dense_block_count", 0),
    }


def _gpt_oss(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope(data, config)
    return {
        **rope,
        "rope_scaling": {**rope.get("rope_scaling", {}), "truncate": False},
        "model_type": "gpt_oss",
        "attention_bias": data.has("attn_q.bias"),
        "num_experts": data.get("expert_count"),
        "num_experts_per_tok": data.get("expert_used_count"),
        "intermediate_size": data.get("expert_feed_forward_length"),
        "sliding_window": data.get("attention.sliding_window"),
    }


def _olmo2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A file with windows is OLMo 3, which only scales the rope of full layers; both ropes have one base."""
    rewritten = _biased(data, config)
    local = data.get("rope.freq_base_swa", rewritten["rope_theta"])
    if local != rewritten["rope_theta"]:
        raise data.error("rope.freq_base_swa", str(local), f"that of other layers, {rewritten['rope_theta']}")
    windows = _windows(data)
    return {**rewritten, **windows, "model_type": "olmo3"} if windows else rewritten


def _windows(data: Metadata) -> dict[str, Any]:
    """Windows in the layers that the file names, or in three of four; none if it has none."""
    window, sliding = data.get("attention.sliding_window"), data.each("attention.sliding_window_pattern")
    if not window:
        return {}
    kinds = None if sliding is None else ["sliding_attention" if its else "full_attention" for its in sliding]
    return {"sliding_window": window, "layer_types": kinds}


def _cohere(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_biased(data, config),
        **_layer_norm(data),
        "model_type": "cohere",
        "logit_scale": data.get("logit_scale"),
        "use_qk_norm": data.has("attn_q_norm.weight"),
    }


def _lfm2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without key heads is a convolution; the stated MLP width is the real one."""
    heads = data.each("attention.head_count_kv") or []
    return {
        **read_rope(data, config),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": data.get("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the last layers, which predict further tokens, and the position axes, which text does not need."""
    data.skip("rope.dimension_sections")
    sizes = {name: _size(data, key) for key, name in _SIZES.items()}
    sizes["linear_value_head_dim"] //= sizes["linear_num_value_heads"]
    more, recurrent = _size(data, "nextn_predict_layers", 0), data.each("attention.recurrent_layers")
    layers = _size(data, "block_count") - more
    kinds = None if recurrent is None else ["linear_attention" if its else "full_attention" for its in recurrent]
    return {
        **read_rope(data, config, partial=True),
        **sizes,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": more,
        "layer_types": kinds and kinds[: len(kinds) - more],
        "full_attention_interval": data.get("full_attention_interval"),
    }


def _qwen35_moe(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = data.get("expert_shared_feed_forward_length")
    return {**_qwen35(data, config), **_experts(data), "shared_expert_intermediate_size": shared}


def _size(data: Metadata, key: str, least: int = 1) -> int:
    """A number that sizes are computed with; ``least`` 0 makes it optional."""
    size = data.get(key, None if least else 0)
    if type(size) is not int or not least <= size < 1 << 20:
        raise data.error(key, repr(size), "a number above 0")
    return size


def _stablelm(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_partial(data, config),
        "use_parallel_residual": data.get("use_parallel_residual", not data.has("ffn_norm.weight")),
        "use_qkv_bias": data.has("attn_q.bias"),
        "qk_layernorm": data.has("attn_q_norm.weight"),
    }


def _gptneox(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_partial(data, config),
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "use_parallel_residual": data.get("use_parallel_residual", True),
        "attention_bias": data.has("attn_qkv.bias"),
    }


def _mistral3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A file with queries scaled by position is Ministral; without them it is Mistral."""
    growth = data.get("attention.temperature_scale")
    scale = data.get("rope.scaling.yarn_log_multiplier", 0.0)
    values = read_rope(data, config)
    if not growth:
        return {**values, "model_type": "mistral", "sliding_window": None}
    rope = {**values.pop("rope_scaling", {}), "mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": growth}
    return {"model_type": "ministral3", "rope_theta": None, "rope_parameters": rope | values}


Reader = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]
ARCHITECTURES: dict[str, Reader] = {
    "llama": lambda data, config: (_mixtral if data.get("expert_count") else _llama)(data, config),
    "mistral3": _mistral3,
    "qwen2": lambda data, config: {**read_rope(data, config), "use_sliding_window": False},
    "qwen3": lambda data, config: {**_biased(data, config), "use_sliding_window": False},
    "gemma": lambda data, config: {**read_rope(data, config), "hidden_act": GELU},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi2": lambda data, config: {**_partial(data, config), "model_type": "phi", "hidden_act": "gelu_new"},
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": lambda data, config: {**_llama(data, config), "no_rope_layer_interval": 4},
    "seed_oss": lambda data, config: {**_llama(data, config), "attention_out_bias": data.has("attn_output.bias")},
    "ernie4_5": lambda data, config: {**read_rope(data, config), "use_bias": data.has("attn_q.bias")},
    "glm4": lambda data, config: _biased(data, config, partial=True),
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "qwen35": _qwen35,
    "qwen35moe": lambda data, config: {**_qwen35_moe(data, config), "model_type": "qwen3_5_moe_text"},
    "qwen3next": lambda data, config: {**_qwen35_moe(data, config), "model_type": "qwen3_next"},
    # Without a key, llama.cpp normalizes the expert weights of all models except OLMoE.
    "qwen3moe": lambda data, config: {
        **_biased(data, config),
        **_experts(data),
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "use_sliding_window": False,
    },
    "olmoe": lambda data, config: {**_biased(data, config), **_experts(data), "norm_topk_prob": False},
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "granitemoe": lambda data, config: {**_granite(data, config), **_experts(data)},
    "exaone4": lambda data, config: {"sliding_window": None, **read_rope(data, config), **_windows(data)},
    # The file stores the rope's base after scaling by alpha.
    "hunyuan-dense": lambda data, config: {**_biased(data, config), "model_type": "hunyuan_v1_dense"},
    "command-r": _cohere,
    "cohere2": lambda data, config: {
        **_cohere(data, config),
        "model_type": "cohere2",
        "use_qk_norm": None,
        **_windows(data),
    },
    # The converter writes no window: llama.cpp attends to all positions.
    "starcoder2": lambda data, config: {
        **read_rope(data, config),
        **_layer_norm(data, "norm_epsilon"),
        "hidden_act": GELU,
        "use_bias": data.has("attn_q.bias"),
    },
    "stablelm": _stablelm,
    "gptneox": _gptneox,
    "gpt2": lambda data, config: {**_layer_norm(data, "layer_norm_epsilon"), "hidden_act": "gelu_new"},
    **diffusion.READERS,
}
