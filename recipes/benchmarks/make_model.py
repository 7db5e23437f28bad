"""Write a random-weight Hugging Face checkpoint with a real model's geometry: speeds are meaningful, texts are not.

Needs torch and transformers. The tokenizer is the small model's of recipes/tiny, so nothing is downloaded.
"""

import argparse
import itertools
import json
import shutil
import string
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

    Embedding and head are tied if the geometry does not say otherwise. Ids beyond the small model's get words of their
    own, so that every token is a piece of text, and no stream of a server is silent.
    """
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**{"tie_word_embeddings": True, **geometry, "bos_token_id": 0, "eos_token_id": 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0, BIAS_DEVIATION)
    model.save_pretrained(folder)
    for path in (*TINY.glob("tokenizer*.json"), TINY / "chat_template.jinja"):
        shutil.copyfile(path, folder / path.name)
    fill_vocabulary(folder / "tokenizer.json", config.vocab_size)


def fill_vocabulary(path: Path, size: int) -> None:
    """Give each id of a tokenizer of byte pairs a text; no merge leads to the new ones, so prompts are what they were.
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
