"""Write a random-weight Hugging Face checkpoint with a real model's geometry: speeds are meaningful, texts are not.

Needs torch, transformers and safetensors. The tokenizer is the small model's in recipes/tiny, so nothing is downloaded.
Weights are made and written layer by layer, so the model may be larger than memory.
"""

import argparse
import itertools
import json
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TINY = Path(__file__).resolve().parents[1] / "tiny" / "checkpoint"
SEED = 0
BIAS_DEVIATION = 0.1  # transformers initializes biases to zero, which would hide a runtime that ignores them
# Keys of config.json that determine shapes.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248_320,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "lfm2.5-1.2b": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12_288,  # two thirds of the real one
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "vocab_size": 65_536,
        "max_position_embeddings": 32_768,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "num_hidden_layers": 20,  # of 35, of which 20 share caches
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 10,  # llama.cpp assumes that the last layers before these are of both kinds
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 4,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 32_768,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 6,  # of 48
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "smolvlm-256m": {
        "model_type": "smolvlm",
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"],  # llama.cpp recognises it by this name
            "model_type": "llama",
            "tie_word_embeddings": True,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "intermediate_size": 1536,
            "vocab_size": 49_280,
            "max_position_embeddings": 8192,
            "rope_theta": 1e5,
            "pad_token_id": 2,
        },
        "vision_config": {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 512,
            "patch_size": 16,
        },
        "scale_factor": 4,
        "image_token_id": 49_261,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 6,  # of 24
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size": 32_768,  # of 201,088, so that the head's part of the work stays realistic
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
}
WIDER = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11_008}
GEOMETRIES["qwen2.5-3b"] = GEOMETRIES["qwen2.5-0.5b"] | WIDER
# For a vision model: SmolVLM's special tokens, which come last, and its processor's files.
SEEING = ("<image>", "<fake_token_around_image>", "<global-img>")
SEEING += tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
PREPROCESSOR = {
    **dict.fromkeys(
        ("do_convert_rgb", "do_image_splitting", "do_normalize", "do_pad", "do_rescale", "do_resize"), True
    ),
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 512},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 2048},
}
PROCESSOR = {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}:{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant:"
)
EXPONENTS = (115, 121)  # of MXFP4's scales: weights of about 0.02


def write_checkpoint(geometry: dict[str, Any], folder: Path, tokenizer: Path = TINY) -> None:
    """Write config.json, reproducible random bfloat16 weights, and the files of a tokenizer's folder.

    Embedding and head are tied unless the geometry says otherwise. Ids beyond the small model's get new words, so that
    every token has text, and no server's stream is silent.
    """
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**{"tie_word_embeddings": True, **geometry, "bos_token_id": 0, "eos_token_id": 2})
    sees = "vision_config" in geometry
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    if config.model_type == "gpt_oss":
        config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    placed = {}
    for prefix, part in parts(model):
        packed = pack_experts(part) if hasattr(config, "quantization_config") else {}
        part.to_empty(device="cpu")
        part.apply(model._init_weights)
        for name, parameter in part.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, 0, BIAS_DEVIATION)
        tensors = {f"{prefix}.{name}": tensor for name, tensor in (part.state_dict() | packed).items()}
        save_file(tensors, folder / f"model-{prefix}.safetensors", {"format": "pt"})
        placed |= dict.fromkeys(tensors, f"model-{prefix}.safetensors")
        part.to("meta")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for path in (*tokenizer.glob("tokenizer*.json"), TINY / "chat_template.jinja"):
        shutil.copyfile(path, folder / path.name)
    fill_vocabulary(folder / "tokenizer.json", config.get_text_config().vocab_size - sees * len(SEEING))
    if sees:
        seeing = Tokenizer.from_file(str(folder / "tokenizer.json"))
        seeing.add_special_tokens(list(SEEING))
        seeing.save(str(folder / "tokenizer.json"))
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))


def parts(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a decoder in the order of their creation, by name; a tied head is the embedding."""
    for name, child in model.model.named_children():
        if not isinstance(child, torch.nn.ModuleList):
            yield f"model.{name}", child
            continue
        yield from ((f"model.{name}.{number}", layer) for number, layer in enumerate(child))
    if not model.config.tie_word_embeddings:
        yield "lm_head", model.lm_head


def pack_experts(part: Any) -> dict[str, torch.Tensor]:
    """Random experts in MXFP4, as in gpt-oss, instead of a layer's own."""
    packed = {}
    if hasattr(part, "mlp"):
        for name in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = getattr(part.mlp.experts, name).shape
            codes = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            packed[f"mlp.experts.{name}_blocks"] = codes
            packed[f"mlp.experts.{name}_scales"] = torch.randint(*EXPONENTS, codes.shape[:-1], dtype=torch.uint8)
            packed[f"mlp.experts.{name}_bias"] = torch.zeros(experts, outputs, dtype=torch.bfloat16)
        part.mlp.experts = torch.nn.Module()
    return packed


def fill_vocabulary(path: Path, size: int) -> None:
    """Give each id of a byte-pair tokenizer a text; no merge makes the new ones, so prompts are encoded as before.
    Raises SystemExit: it has more tokens than ``size``."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if len(vocabulary) > size:
        raise SystemExit(f"{path} has {len(vocabulary)} tokens, the geometry has room for {size}")
    words = ("\u0120" + "".join(letters) for letters in itertools.product(string.ascii_uppercase, repeat=4))
    new = itertools.islice((word for word in words if word not in vocabulary), size - len(vocabulary))
    vocabulary.update({word: number for number, word in enumerate(new, len(vocabulary))})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_checkpoint(GEOMETRIES[args.geometry], args.folder)


if __name__ == "__main__":
    main()
