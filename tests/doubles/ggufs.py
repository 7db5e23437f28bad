"""GGUF files as llama.cpp's converter writes them, from random checkpoints, by the ``gguf`` package."""

import json
import re
from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from llmc.export.families.llada import KEYS

Kind = gguf.GGMLQuantizationType
# A vocabulary of letters for models whose text does not matter.
TOKENIZER: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab"],
    "token_type": [3, 3, *[1] * 27],
    "merges": ["a b"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# llama.cpp's names, where they are others than Hugging Face's.
ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "phi": "phi2",
    "granitemoehybrid": "granite",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "Dream": "dream",
    "falcon_h1": "falcon-h1",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
TURNED = ("llama", "mistral", "mixtral", "ministral3", "granite", "granitemoe", "granitemoehybrid", "smollm3", "llada")
DELTA = ("qwen3_5_text", "qwen3_next")
# Families whose converter does not write these.
NO_KV, NO_BASE = ("gpt2", "gpt_neox"), ("gpt2", "gpt_neox", "phi", "stablelm", "gemma")
# Width of MLPs that the random one's config leads to.
LFM2_INNER = 256
# Where in a block the scales in float16 lie, of the types that gguf can only unpack.
PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
PLACES |= {"IQ4_XS": (0,), "MXFP4": (), "NVFP4": (), "Q1_0": (0,), "Q2_0": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}
# Newer than the package. Sources: ggml-common.h and ggml-quants.c
SIZES = {**{kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}, "Q2_0": (64, 18)}


def write_gguf(
    checkpoint: Path,
    path: Path,
    kinds: Mapping[str, str] | str = "F32",
    tokenizer: Mapping[str, Any] = TOKENIZER,
    metadata: Mapping[str, Any] | None = None,
    parts: int = 1,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Convert a random checkpoint, and return the path of the (first) file.

    Args:
        kinds: type of all matrices, or by the name in the file.
        metadata: keys without the architecture to write or, with None, to leave out.
        parts: files to write.
        more: tensors to write besides, by name.
    """
    config = {KEYS.get(key, key): value for key, value in json.loads((checkpoint / "config.json").read_text()).items()}
    if config["model_type"] == "nemotron_h":
        config["num_hidden_layers"] = len(config["layers_block_type"])
    architecture = (
        "granitehybrid"
        if _is_mamba(config)
        else "nemotron_h_moe"
        if "nemotron" in config["model_type"] and "moe" in config["layers_block_type"]
        else ARCHITECTURES.get(config["model_type"], config["model_type"])
    )
    options = {"split_max_tensors": -(-len(load(checkpoint)) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in ({**_geometry(config), **(metadata or {})}).items():
        if value is not None:
            _add(writer, key if key.startswith(("general.", "split.")) else f"{architecture}.{key}", value)
    for key, value in tokenizer.items():
        _add(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), _any(config, *LAYERS)
    )
    for name, array in (_stack_experts(_repack_mxfp4(load(checkpoint))) | _factors(config)).items():
        for part, arranged in _convert(config, name, array).items():
            new = part if part.startswith("rope_") else names.get_name(part, try_suffixes=(".weight", ".bias"))
            if new is None and (scale := re.fullmatch(r".*\.(\d+)\.router\.(scale|per_expert_scale)", part)):
                new = f"blk.{scale[1]}.{'ffn_gate_inp' if scale[2] == 'scale' else 'ffn_down_exps'}.scale"
            assert new is not None, part
            plain = arranged.ndim == 1 or "ffn_gate_inp" in new or "conv" in new
            kind = "F32" if plain else kinds if isinstance(kinds, str) else kinds[new]
            writer.add_tensor(new, *_packed(arranged, kind))
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


LAYERS, HEADS, HIDDEN = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd")


def _any(config: dict[str, Any], *names: str) -> Any:
    """The value of the first of these keys that the config has."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def load(checkpoint: Path) -> dict[str, np.ndarray]:
    """All of a checkpoint's float32 tensors."""
    return {name: array for file in checkpoint.glob("*.safetensors") for name, array in load_file(file).items()}


def _stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices of experts in one tensor, gate and up apart; the names are those that :mod:`gguf` knows."""
    found: dict[str, Any] = {}
    for name, array in sorted(tensors.items(), key=lambda item: [int(it) for it in re.findall(r"\d+", item[0])]):
        if part := re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe|mixer)\.experts\.\d+\.(\w+)\.weight", name):
            own = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part[2], part[2])
            found.setdefault(f"{part[1]}.mlp.experts.{own}.weight", []).append(array)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            base = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
            found |= zip([base.format("gate"), base.format("up")], np.split(array, 2, 1), strict=True)
        else:
            name = name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")
            found[f"{name}.weight" if name.endswith(("layer_scalar", "up_proj", "down_proj")) else name] = array
    return {name: np.stack(array) if isinstance(array, list) else array for name, array in found.items()}


def _repack_mxfp4(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of gpt-oss: gate and up, whose rows take turns, apart; scale and codes of a block together, of which the
    first and the 17th are in one byte. Names of sinks end as weights do."""
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        base, _, kind = name.rpartition("_")
        own, stack = name, array
        if kind == "scales":
            continue
        if kind == "blocks":
            codes = np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], 2, 16)
            packed = codes[..., 0, :] | codes[..., 1, :] << np.uint8(4)
            blocks = np.concatenate([tensors[f"{base}_scales"][..., None], packed], -1)
            own, stack = f"{base}.weight", blocks.reshape(*blocks.shape[:2], -1)
        elif name.endswith("_proj_bias"):
            own = f"{base}.bias"
        elif name.endswith(".sinks"):
            own = f"{name}.weight"
        if "experts.gate_up_proj." in own:
            halves = zip(("gate_proj", "up_proj"), (stack[:, ::2], stack[:, 1::2]), strict=True)
            found |= {own.replace("gate_up_proj", half): np.ascontiguousarray(part) for half, part in halves}
        else:
            found[own] = stack
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The only rope, or that of the layers that see everything."""
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def _geometry(config: dict[str, Any]) -> dict[str, Any]:
    rope, family = _rope(config), config["model_type"]
    heads, hidden = _any(config, *HEADS), _any(config, *HIDDEN)
    head_dim = config.get("head_dim") or hidden // heads
    inner = _any(config, "shared_intermediate_size", "n_inner", "intermediate_size")
    experts = _any(config, "num_local_experts", "num_experts")
    inner = LFM2_INNER if family == "lfm2" else config["intermediate_size"] if _is_mamba(config) else inner
    theta = rope.get("rope_theta", 10_000.0) * rope.get("alpha", 1) ** (head_dim / (head_dim - 2))
    return {
        "block_count": _any(config, *LAYERS),
        "context_length": _any(config, "max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": None if family in NO_KV else _kv_heads(config),
        "attention.layer_norm_rms_epsilon": _any(config, "rms_norm_eps", "norm_eps"),
        "shortconv.l_cache": config.get("conv_L_cache"),
        "attention.layer_norm_epsilon": _any(config, "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.dimension_count": None if family == "gpt2" else int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.freq_base": None if family in NO_BASE else float(theta),
        "vocab_size": config["vocab_size"],
        "use_parallel_residual": config.get("use_parallel_residual"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": _any(config, "logit_scale", "logits_scaling"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": experts,
        "expert_used_count": _any(config, "num_experts_per_tok", "top_k_experts") if experts else None,
        "expert_feed_forward_length": inner if family == "gpt_oss" else config.get("moe_intermediate_size"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        **_scaling(rope),
        **_windows(config),
        **(_states(config) if family in DELTA else {}),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        **(_mamba(config) if _is_mamba(config) else {}),
        **(_layers(config) if family == "gemma4_text" else {}),
        **({**_ssm(config), "embedding_scale": None} if family in SSM else {}),
        **(_latent(config) if family in LATENT else {}),
    }


SSM = {"falcon_h1": ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")}
SSM["nemotron_h"] = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def _ssm(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("conv_kernel", "state_size", "group_count", "time_step_rank")
    found = {f"ssm.{key}": config[name] for key, name in zip(keys, SSM[config["model_type"]], strict=True)}
    if config["model_type"] == "falcon_h1":
        return {**found, "ssm.inner_size": config["mamba_d_ssm"]}
    kinds, moe = config["layers_block_type"], "moe" in config["layers_block_type"]
    width = config["moe_intermediate_size" if moe else "intermediate_size"]
    found |= {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "expert_count": None,
        "expert_used_count": None,
        "expert_feed_forward_length": None,
    }
    shared = {"expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"]}
    more = {**_grouped(config), **shared, "moe_latent_size": config.get("moe_latent_size")}
    return {**found, **(more if moe else {})}


def _grouped(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of heads as attention over the latent vector has them, and as it is split into."""
    turned, rank, magnitude = config["qk_rope_head_dim"], config["kv_lora_rank"], _rope(config).get("mscale_all_dim")
    return {
        **_grouped(config),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": turned,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "rope.scaling.yarn_log_multiplier": 0.1 * magnitude if magnitude else None,
    }


def _layers(config: dict[str, Any]) -> dict[str, Any]:
    """What differs from layer to layer."""
    sliding, own = [kind == "sliding_attention" for kind in config["layer_types"]], config["per_layer_config"]
    full, shared = own[min(own)], config["num_kv_shared_layers"]
    inner, heads = config["intermediate_size"], config["num_key_value_heads"]
    return {
        "feed_forward_length": [inner] * (len(sliding) - shared)
        + [inner * (1 + config["use_double_wide_mlp"])] * shared,
        "attention.head_count_kv": [heads if its else full.get("num_key_value_heads", heads) for its in sliding],
        **{f"attention.{part}_length": full["head_dim"] for part in ("key", "value")},
        **{f"attention.{part}_length_swa": config["head_dim"] for part in ("key", "value")},
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }


def _states(config: dict[str, Any]) -> dict[str, Any]:
    keys, values, width = (config[f"linear_{it}"] for it in ("num_key_heads", "num_value_heads", "value_head_dim"))
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * width,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _is_mamba(config: dict[str, Any]) -> bool:
    return config["model_type"] == "granitemoehybrid" and not {*config["layer_types"]} <= {*ATTENTION}


def _mamba(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
    }


ATTENTION = ("attention", "full_attention")


def _kv_heads(config: dict[str, Any]) -> int | list[int]:
    if config["model_type"] != "lfm2" and not _is_mamba(config):
        return config["num_key_value_heads"]  # type: ignore[no-any-return]
    return [config["num_key_value_heads"] * (kind in ATTENTION) for kind in config["layer_types"]]


def _windows(config: dict[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    if family in ("gemma2", "cohere2", "gpt_oss"):
        return {"attention.sliding_window": config["sliding_window"]}
    if family in ("olmo3", "exaone4"):
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}
    if family not in ("phi3", "gemma3_text"):
        return {}
    found = {"attention.sliding_window": config.get("sliding_window") or 0}
    if config["model_type"] == "phi3":
        original, last = config["original_max_position_embeddings"], config["max_position_embeddings"]
        found["rope.scaling.attn_factor"] = sqrt(log(last) / log(original))
        return found | {"rope.scaling.original_context_length": original}
    swa = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    every = config["layer_types"].index("full_attention") + 1
    return found | {"attention.sliding_window_pattern": every, "rope.freq_base_swa": swa}


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type") not in ("linear", "yarn"):
        return {}
    found = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
        if rope.get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return found


def _factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Llama 3.1's factors, as the converter computes them one by one."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        factors = {kind: np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
        return {f"rope_factors_{kind}.weight": array for kind, array in factors.items()}
    if rope.get("rope_type") == "proportional":
        pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turning = int(pairs * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _convert(config: dict[str, Any], name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """As :func:`_arranged`; the matrix behind a latent vector becomes one of keys, turned, and one of values."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("kv_b_proj.weight"):
        width = config["qk_nope_head_dim"]
        split = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        parts = {"k_b": split[:, :width].swapaxes(1, 2), "v_b": split[:, width:]}
        return {name.replace("kv_b", part): np.ascontiguousarray(it) for part, it in parts.items()}
    if config["model_type"] == "falcon_h1":
        array = _multiply(config, name, array)
    if config["model_type"] == "nemotron_h":  # names that the package knows
        name = re.sub(r"^(model|backbone)\.layers", "model.layers" if ".mlp." in name else "backbone.layers", name)
    return _arranged(config, name, array)


def _arranged(config: dict[str, Any], name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The converter's tensors of one: rows of rotated heads in pairs as llama.cpp's llama models have them, Gemma's
    norms with one added, weights of GPT-2 turned, those of GPT-NeoX's heads apart, Granite's gate and up apart."""
    family, module, heads = config["model_type"], name.split(".")[-2], _any(config, *HEADS)
    if family.startswith("gemma") and family != "gemma4_text" and name.endswith("norm.weight"):
        return {name: array + 1}
    if family == "gpt2" and array.ndim == 2 and module.startswith("c_"):
        return {name: np.ascontiguousarray(array.T)}
    if family == "gpt_neox" and module == "query_key_value":
        parts = array.reshape(heads, 3, -1, *array.shape[1:])
        return {name: np.ascontiguousarray(parts.swapaxes(0, 1).reshape(array.shape))}
    if array.ndim == 3 and "conv" in name:
        array = array[:, 0]
    if "linear_attn." in name or ".mamba." in name or ".mixer." in name:
        return (_recurrent if "linear_attn." in name else _arrange_mamba)(config, name, array)
    if family in DELTA and name.endswith("norm.weight"):
        return {name: array + 1}
    if module == "input_linear":
        halves = np.split(array, 2)
        return {
            name.replace("shared_mlp.input_linear", f"mlp.{it}_proj"): half
            for it, half in zip(("gate", "up"), halves, strict=True)
        }
    if module == "output_linear":
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): array}
    turned = {"q_proj": heads, "k_proj": config.get("num_key_value_heads")}.get(module)
    if family not in TURNED or turned is None:
        return {name: array}
    shape = (turned, 2, array.shape[0] // turned // 2, *array.shape[1:])
    return {name: np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2).reshape(array.shape))}


def _recurrent(config: dict[str, Any], name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of a recurrent layer: value heads in another order, A itself, and another name of a bias."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = values * config["linear_value_head_dim"]
    if name.endswith("A_log"):
        array = -np.exp(array)
    if "in_proj_qkvz" in name:
        width = config["linear_key_head_dim"]
        parts = np.split(array.reshape(keys, -1, array.shape[-1]), [width, 2 * width, 2 * width + size // keys], 1)
        flat = [part.reshape(-1, array.shape[-1]) for part in parts]
        return {name.replace("qkvz", "qkv"): np.concatenate(flat[:3]), name.replace("qkvz", "z"): flat[3]}
    if config["model_type"] == "qwen3_next":
        return {name.replace("dt_bias", "dt_proj.bias"): array}
    if name.endswith("out_proj.weight"):
        turned = array.T.reshape(keys, values // keys, -1, len(array)).swapaxes(0, 1)
        return {name: np.ascontiguousarray(turned.reshape(size, -1).T)}
    if not name.endswith("norm.weight"):
        before = len(array) - size if "qkv" in name or "conv1d" in name else 0
        own = array[before:].reshape(keys, values // keys, -1, *array.shape[1:]).swapaxes(0, 1)
        array = np.concatenate([array[:before], own.reshape(array[before:].shape)])
    return {name.replace("dt_bias", "dt_proj.bias"): array}


def _multiply(config: dict[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """Falcon-H1's multipliers, which the file's weights contain."""
    read, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = np.repeat(config["ssm_multipliers"], (inner, inner, state, state, config["mamba_n_heads"]))
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": read,
        "k_proj": read * config["key_multiplier"],
        "v_proj": read,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * rows[:, None],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    multiplied: np.ndarray = (array * factors.get(name.split(".")[-2], 1)).astype(np.float32)
    return multiplied


def _arrange_mamba(config: dict[str, Any], name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Vectors in two dimensions, A itself, and another name of a bias."""
    array = -np.exp(array) if name.endswith("A_log") else array
    if name.endswith(("A_log", ".D", "norm.weight")):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        array = array.reshape(groups if name.endswith("norm.weight") else array.size, -1)
    bias = "dt.bias" if ".mixer." in name else "dt_proj.bias"
    return {name.replace("dt_bias", bias): array}


def _packed(array: np.ndarray, kind: str) -> tuple[np.ndarray, None, Kind]:
    if array.dtype == np.uint8:
        return array, None, Kind.MXFP4
    if kind in PLACES:
        return random_blocks(array.shape, kind), None, Kind[kind]
    return gguf.quantize(array.astype(np.float32), Kind[kind]), None, Kind[kind]


def dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks uint8 [N, bytes] -> float32 [N, K]."""
    if kind not in ("Q1_0", "Q2_0"):  # which the package cannot unpack
        found: np.ndarray = gguf.dequantize(raw, Kind[kind])
        return found
    blocks, bits = raw.reshape(-1, 18), int(kind[1])
    fields = blocks[:, 2:, None] >> np.arange(0, 8, bits, np.uint8) & ((1 << bits) - 1)
    levels = fields.reshape(len(blocks), -1).astype(np.float32)
    levels = 2 * levels - 1 if bits == 1 else levels - 1
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (levels * scales).reshape(len(raw), -1)


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Any codes, with scales that make weights of about 0.1."""
    weights, size = SIZES[kind]
    random = np.random.default_rng(len(kind) + size)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), np.uint8)
    for place in PLACES[kind]:
        scale = random.uniform(1e-4, 3e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(120, 124, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)
