"""Tiny checkpoints: random ones of every family beside their transformers models, and one written by hand to break."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import invented
from doubles.lowerings import open_session
from doubles.shared import shared
from doubles.tiny import BASE, tiny, write_tokenizer

Feeds = dict[str, np.ndarray]
Run = Callable[[Feeds], list[np.ndarray]]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # small, so that tiny heads have short, medium and long wavelengths
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 3}
# Windows are shorter than the 20 tokens that the tests feed. dtype and shard_size say how the checkpoint is stored.
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SWASH = {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "layer_rope_theta": [500.0, 100.0, 0, 500.0],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
LATENT_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope-tied": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-linear-rope-no-groups-fp16": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        "num_key_value_heads": 4,
        "dtype": "float16",
    },
    "mistral-window-wide-heads": {"model_type": "mistral", "sliding_window": 6, "head_dim": 32},
    "mistral-one-kv-head-bf16": {
        "model_type": "mistral",
        "sliding_window": None,
        "num_key_value_heads": 1,
        "dtype": "bfloat16",
    },
    "qwen2-tied-bf16": {"model_type": "qwen2", "tie_word_embeddings": True, "dtype": "bfloat16"},
    "qwen2-window-in-second-layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3-tied-sharded": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "shard_size": "100KB"},
    "llama-yarn-rope": {"model_type": "llama", "rope_parameters": YARN_ROPE},
    "phi3-packed-window-fp16": {
        "model_type": "phi3",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 12,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
        },
        "sliding_window": 6,
        "dtype": "float16",
        "pad_token_id": None,
    },
    "seed_oss-output-bias": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    "smollm3-every-second-layer-rotated": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "pad_token_id": None,
    },
    "gemma2-softcaps": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3-two-ropes": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 6,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "cohere2-window-rotated": {
        "model_type": "cohere2",
        "num_key_value_heads": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.5,
    },
    "hunyuan-norm-after-rope": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0},
        "tie_word_embeddings": True,
    },
    "ministral3-growing-queries": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            **YARN_ROPE,
            "original_max_position_embeddings": 6,
            "factor": 20.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "olmo3-yarn-in-full-layers": {
        "model_type": "olmo3",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "exaone4-window-rotated": {
        "model_type": "exaone4",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4-keys-are-values": {
        **GEMMA4,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_unified-shared-caches": {
        **GEMMA4,
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4-experts-beside-mlp": {
        **GEMMA4,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "gemma4-shared-caches-per-layer-inputs": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "dtype": "bfloat16",
    },
    "muse_glimmer-normed-embeddings": {
        "model_type": "muse_glimmer",
        "auto": "AutoModelForImageTextToText",
        "text_config": {
            **BASE,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "layer_rope_theta": [500.0, 0, 500.0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "head_dim": 16,
            "sliding_window": 6,
            "qk_scale_factor": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 5.0,
            "rms_norm_eps": 1e-3,
            "post_norm_eps": 0.5,
            "attention_bias": True,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 2,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "image_token_id": 95,
    },
    "ernie4_5-interleaved-rope-biases": {"model_type": "ernie4_5", "head_dim": 32, "use_bias": True},
    "granite-multipliers": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "granite_swa-bases-by-layer": {
        **SWASH,
        "model_type": "granite_swa",
        "dtype": "bfloat16",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "granitemoe_swa-experts-beside-mlp": {
        **SWASH,
        **MIXTURE,
        "model_type": "granitemoe_swa",
        "dtype": "bfloat16",
        "shared_intermediate_size": 48,
        "attention_multiplier": 0.1,
    },
    "gemma-bf16": {"model_type": "gemma", "head_dim": 32, "dtype": "bfloat16", "pad_token_id": None},
    "olmo2-norms-behind": {"model_type": "olmo2", "attention_bias": True, "pad_token_id": None},
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["attention", "attention"],
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid-mamba-bf16": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "dtype": "bfloat16",
    },
    "falcon_h1-both-mixers-multipliers": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.75,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.5,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.75, 0.5],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.5, 0.75, 0.6, 1.5, 0.9],
        "ssm_out_multiplier": 0.5,
    },
    "deepseek_v2-latent-keys-grouped-experts": {
        **LATENT,
        **LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
        "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3-latent-queries-corrected-groups": {
        **LATENT,
        **LATENT_EXPERTS,
        "model_type": "deepseek_v3",
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "glm4_moe_lite-last-layer-dense": {
        **LATENT,
        **LATENT_EXPERTS,
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["sparse", "dense"],
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "youtu-dense-tied": {**LATENT, "model_type": "youtu", "rope_interleave": False},
    "nemotron_h-one-part-per-layer": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 0.5,  # far above the published one, so that steps are below
    },
    "qwen3_5-delta-and-gates": {
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "qwen3_next-packed-by-key-heads": {
        "model_type": "qwen3_next",
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "lfm2-short-convolutions": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_bias": True},
    "olmo_hybrid-corrections-up-to-two": {
        "model_type": "olmo_hybrid",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "pad_token_id": None,
    },
    "lfm3-windows-and-head-gates": {
        "model_type": "lfm3",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "head_dim": 32,
        "sliding_window": 6,
        "conv_L_cache": 5,
        "conv_bias": True,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "pad_token_id": None,
    },
    "qwen3_moe-first-layer-dense-bf16": {
        **MIXTURE,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "dtype": "bfloat16",
    },
    "olmoe-unnormalized": {**MIXTURE, "model_type": "olmoe", "num_key_value_heads": 4, "pad_token_id": None},
    "mixtral-experts": {**MIXTURE, "model_type": "mixtral"},
    "granitemoe-experts": {
        **MIXTURE,
        "model_type": "granitemoe",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "gpt_oss-sinks-clamped-experts-bf16": {
        **MIXTURE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 6,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
        "swiglu_limit": 1.0,
        "dtype": "bfloat16",
    },
    "apertus-learned-activation": {"model_type": "apertus", "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "starcoder2-window-fp16": {"model_type": "starcoder2", "sliding_window": 6, "dtype": "float16"},
    "glm4-sandwich": {"model_type": "glm4", "head_dim": 16, "attention_bias": True, "pad_token_id": None},
    "cohere-parallel": {"model_type": "cohere", "logit_scale": 0.25, "pad_token_id": None},
    "cohere-norms-of-each-head-bf16": {
        "model_type": "cohere",
        "use_qk_norm": True,
        "dtype": "bfloat16",
        "pad_token_id": None,
    },
    "stablelm-parallel-bf16": {
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
        "dtype": "bfloat16",
    },
    "phi-head-bias-fp16": {"model_type": "phi", "dtype": "float16"},
    "gpt_neox-two-norms": {"model_type": "gpt_neox", "num_key_value_heads": 4, "rotary_pct": 0.5},
    "gpt2-scale-by-layer": {
        "model_type": "gpt2",
        "n_inner": 96,
        "intermediate_size": 96,
        "num_key_value_heads": 4,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "qwen3-biases-window-in-first-layer": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


# Families with layers that are lowered for CPUs alone.
ON_CPUS = [
    "apertus",
    "falcon_h1",
    "gemma4_text",
    "gemma4_unified_text",
    "granite_swa",
    "lfm2",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "youtu",
]
# Whose chunks round otherwise than single steps, in transformers.
STEPWISE = ("olmo_hybrid", "qwen3_5_text", "qwen3_next")
DENSE = tuple(
    name
    for name, case in CASES.items()
    if "num_experts_per_tok" not in case
    and case["model_type"] not in ON_CPUS
    and "mamba" not in case.get("layer_types", ())
)


@dataclass(frozen=True)
class Case:
    """A random checkpoint, its export, and transformers running it in float32."""

    name: str
    checkpoint: Path
    export: Path

    @cached_property
    def reference(self) -> Any:
        return (invented.Reference if self.name == "invented" else Reference)(self.checkpoint)


@pytest.fixture(autouse=True)
def invented_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented family can be read like any other."""
    invented.register(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def traced_once(one_trace: None) -> None:
    """All exports of tiny checkpoints share their traces."""


def make_case(name: str, factory: pytest.TempPathFactory, **changes: Any) -> Case:
    """A random checkpoint by its name and what its config has otherwise, with its export: made once for all processes
    that run tests, so nobody may change them."""
    case = {**CASES.get(name, {}), **changes}

    def make(folder: Path) -> None:
        from llmc.export import export

        with pytest.MonkeyPatch.context() as patch:
            if name == "invented":
                invented.register(patch)
                invented.write_checkpoint(folder / "checkpoint")
            else:
                tiny(folder / "checkpoint", **case)
            export(folder / "checkpoint", folder / "export")

    digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
    folder = shared(factory, f"{name}-{digest}", make)
    return Case(name, folder / "checkpoint", folder / "export")


class Reference:
    """transformers in float32, on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        whole = "text_config" in json.loads((folder / "config.json").read_text())
        auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def __call__(self, ids: np.ndarray, start: int = 0) -> np.ndarray:
        """Logits [B, S, V] of tokens whose first position is ``start``."""
        import torch

        positions = torch.arange(start, start + ids.shape[1])[None]
        stepwise = self.model.config.model_type in STEPWISE
        step = 1 if stepwise else ids.shape[1]
        past, logits = None, []
        with torch.no_grad():
            for each, places in zip(torch.from_numpy(ids).split(step, 1), positions.split(step, 1), strict=True):
                found = self.model(each, position_ids=places, cache=past, use_cache=True)
                past = found.cache
                logits.append(found.logits)
        return torch.cat(logits, 1).numpy()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """A random checkpoint by its name and what its config has otherwise; each is made once."""
    return cache(lambda name, **changes: make_case(name, tmp_path_factory, **changes))


@pytest.fixture(scope="session")
def transformers_model() -> Callable[[Path], Reference]:
    """Opens a checkpoint in transformers."""
    return Reference


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with the random checkpoint of a name, or of a config, which is not exported."""

    def write(name: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        return tiny(folder, **{**CASES[name], **changes})

    return cache(write)


@pytest.fixture
def write_case() -> Callable[[dict[str, Any], Path], Any]:
    """Writes a random checkpoint of a config into a folder; transformers, running it."""

    def write(case: dict[str, Any], folder: Path) -> Any:
        return Reference(tiny(folder, **case))

    return write


@pytest.fixture(scope="session", params=[*CASES, "invented"])
def case(request: pytest.FixtureRequest, exported: Callable[..., Case]) -> Case:
    """Each of the random checkpoints in turn, and the one whose layers differ."""
    return exported(request.param)


@pytest.fixture(scope="session")
def window_case(exported: Callable[..., Case]) -> Case:
    """One checkpoint with a sliding window, for tests that need no second family."""
    return exported("mistral-window-wide-heads")


@pytest.fixture(scope="session")
def invented_case(exported: Callable[..., Case]) -> Case:
    """The one whose layers differ."""
    return exported("invented")


@pytest.fixture(scope="session")
def onnxruntime_run() -> Callable[[Path], Run]:
    """Opens an exported folder in ONNX Runtime on the CPU."""

    def open_graph(folder: Path) -> Run:
        session = open_session(folder / "decoder.onnx")
        return lambda feeds: session.run(None, feeds)

    return open_graph


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": [16, 8],
    "model.layers.0.input_layernorm.weight": [8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [8, 8],
    "model.layers.0.self_attn.v_proj.weight": [8, 8],
    "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.post_attention_layernorm.weight": [8],
    "model.layers.0.mlp.gate_proj.weight": [12, 8],
    "model.layers.0.mlp.up_proj.weight": [12, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 12],
    "model.norm.weight": [8],
    "lm_head.weight": [16, 8],
}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """Write float32 arrays; ``dtypes`` may claim another dtype of the same size in the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name, "F32")
        offsets = [position, position := position + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(array.astype(np.float32).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class HandWritten:
    """A small valid Llama checkpoint, and the ways to change it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        generator = np.random.default_rng(0)
        self.tensors = {name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
        self.set_config()
        self.write_weights()
        write_tokenizer(folder)

    def set_config(self, remove: str | None = None, **changes: Any) -> None:
        config = {key: value for key, value in {**CONFIG, **changes}.items() if key != remove}
        (self.folder / "config.json").write_text(json.dumps(config))

    def write_weights(self, dtypes: dict[str, str] | None = None) -> None:
        write_safetensors(self.folder / "model.safetensors", self.tensors, dtypes)

    def split(self) -> None:
        """Turn the weights into two shards with an index."""
        (self.folder / "model.safetensors").unlink()
        names = list(self.tensors)
        shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for file, part in shards.items():
            write_safetensors(self.folder / file, {name: self.tensors[name] for name in part})
        self.write_index({name: file for file, part in shards.items() for name in part})

    def write_index(self, weight_map: dict[str, Any]) -> None:
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> HandWritten:
    """A valid checkpoint of one layer, to be broken by the test."""
    return HandWritten(tmp_path / "checkpoint")
