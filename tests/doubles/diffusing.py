"""Tiny diffusion language models with random weights, what transformers computes of them, and their sampling in numpy.

LLaDA is Llama, and Dream Qwen2, where every position sees all others: transformers takes such a mask. The sampling is
written from its rules (arXiv 2502.09992, 2508.15487, 2505.22618) and runs a whole forward for every step.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "checkpoint"
VOCAB, MASK, EOS = 4096, 3, 0
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLADA_KEYS = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}
# As published: the parts that they turn off, and what is for training.
LLADA = {
    **{"activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0},
    **{"attention_layer_norm": False, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False},
    **{"block_group_size": 1, "block_type": "llama", "embedding_dropout": 0.0, "embedding_size": VOCAB},
    **{"flash_attention": False, "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None},
    **{"init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "mlp_ratio": 4},
    **{"layer_norm_type": "rms", "layer_norm_with_affine": True, "multi_query_attention": None, "rope": True},
    **{"precision": "amp_bf16", "residual_dropout": 0.0, "rope_full_precision": True, "scale_logits": False},
}
LLADA_NAMES = (
    *(("model.embed_tokens", "model.transformer.wte"), ("model.norm", "model.transformer.ln_f")),
    *(("lm_head", "model.transformer.ff_out"), ("model.layers", "model.transformer.blocks")),
    *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"), ("self_attn.o_proj", "attn_out")),
    *(("mlp.gate_proj", "ff_proj"), ("mlp.down_proj", "ff_out"), ("self_attn.", ""), ("mlp.", "")),
)
DREAM = {"max_window_layers": 28, "sliding_window": None, "use_mrope": False, "use_sliding_window": False}
DREAM |= {"hidden_act": "silu", "rope_scaling": None}


def _model(family: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": SIZES["rope_theta"]}}
    if family == "llada":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()  # type: ignore[arg-type]
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()  # type: ignore[arg-type]


def _rename(name: str) -> str:
    for ours, theirs in LLADA_NAMES:
        name = name.replace(ours, theirs)
    return name


def write_checkpoint(folder: Path, family: str) -> Path:
    """A new ``folder`` with random weights of ``llada`` or ``Dream`` and the small model's tokenizer."""
    folder.mkdir(parents=True)
    own = {"model_type": family, "mask_token_id": MASK, "pad_token_id": EOS, "eos_token_id": EOS, "use_cache": False}
    sizes = {LLADA_KEYS.get(key, key): value for key, value in SIZES.items()} if family == "llada" else SIZES
    config = {**own, **sizes, **(LLADA if family == "llada" else DREAM)}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, tensor in _model(family).state_dict().items():  # far from ties, and confident enough for thresholds
        around = 1.0 if "norm" in name else 0.0
        tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.25 + around
    tensors["lm_head.weight"] *= 2.0
    found = {_rename(name) if family == "llada" else name: tensor for name, tensor in tensors.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Reference:
    """Logits (S, V) of one text (S), each position of which sees all, by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        family = json.loads((folder / "config.json").read_text())["model_type"]
        stored, self._model = load_file(folder / "model.safetensors"), _model(family)
        names = self._model.state_dict()
        self._model.load_state_dict({name: stored[_rename(name) if family == "llada" else name] for name in names})

    def __call__(self, ids: Any) -> NDArray[np.float32]:
        every = torch.zeros(1, 1, len(ids), len(ids))
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([list(map(int, ids))]), attention_mask=every).logits
        found: NDArray[np.float32] = logits[0].numpy()
        return found
