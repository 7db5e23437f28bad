"""Write a random-weight Hugging Face checkpoint with a real model's geometry: speeds are meaningful, texts are not.

Needs torch and transformers. The tokenizer is the small model's of recipes/tiny, so nothing is downloaded.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = Path(__file__).resolve().parents[1] / "tiny" / "checkpoint"
SEED = 0
BIAS_DEVIATION = 0.1  # transformers leaves biases at zero, where a runtime that forgets them would go unnoticed
# The keys of config.json that decide shapes.
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
}


def write_checkpoint(geometry: dict[str, Any], folder: Path) -> None:
    """Write config.json and random bfloat16 weights, the same ones each time, and the tokenizer's files.

    Embedding and head are tied. Ids beyond the tokenizer's decode to nothing.
    """
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    config = AutoConfig.for_model(bos_token_id=0, eos_token_id=2, tie_word_embeddings=True, **geometry)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0, BIAS_DEVIATION)
    model.save_pretrained(folder)
    for path in (*TINY.glob("tokenizer*.json"), TINY / "chat_template.jinja"):
        shutil.copyfile(path, folder / path.name)


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_checkpoint(GEOMETRIES[args.geometry], args.folder)


if __name__ == "__main__":
    main()
