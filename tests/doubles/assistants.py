"""Random assistants for a random Gemma 4, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from doubles.tiny import draw
from safetensors.torch import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

CLUSTERS, BEST = 8, 3
KEPT = ("num_key_value_heads", "head_dim", "vocab_size", "sliding_window", "rope_parameters", "attention_k_eq_v")


def write_assistant(folder: Path, model: Path, *, clustered: bool = False, planted: bool = False) -> Path:
    """Four layers with the heads of the model's; a planted one hands the last token's embedding on."""
    stated, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    width = stated["hidden_size"]
    full = next(iter(stated["per_layer_config"].values()))
    text: dict[str, Any] = {name: stated[name] for name in KEPT}
    text |= {"model_type": "gemma4_text", "hidden_size": width if planted else 48, "intermediate_size": 96}
    text |= {"num_hidden_layers": 4, "num_attention_heads": 4, "per_layer_config": {"1": full, "3": full}}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": None}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    clusters = {"use_ordered_embeddings": clustered, "num_centroids": CLUSTERS, "centroid_intermediate_top_k": BEST}
    torch.manual_seed(1)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width, **clusters)
    assistant = draw(Gemma4AssistantForCausalLM(config))
    with torch.no_grad():
        for name, parameter in assistant.named_parameters():
            if planted and name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.zero_()
        for name, buffer in assistant.named_buffers():
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
        if planted:
            assistant.pre_projection.weight.copy_(torch.eye(width, 2 * width))
            assistant.model.norm.weight.copy_(tensors["model.norm.weight"])
            assistant.lm_head.weight.copy_(tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]))
    assistant.save_pretrained(folder)
    return folder
