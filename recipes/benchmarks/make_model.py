"""Write a random-weight Hugging Face checkpoint with a real model's geometry: speeds are meaningful, texts are not.

Needs torch, transformers and tokenizers. The tokenizer is a small byte-level BPE trained on the standard library, so
nothing is downloaded.
"""

import argparse
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

END, START_OF_TURN, END_OF_TURN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_VOCABULARY = 16_000
SEED = 0
BIAS_DEVIATION = 0.1  # transformers leaves biases at zero, where a runtime that forgets them would go unnoticed
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Geometry:
    """A model class with the keys of its config.json that decide shapes."""

    model: type[PreTrainedModel]
    config: Callable[..., PretrainedConfig]
    keys: dict[str, Any]


GEOMETRIES = {
    "qwen2.5-0.5b": Geometry(
        Qwen2ForCausalLM,
        Qwen2Config,
        {
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
    ),
    "llama-3.2-1b": Geometry(
        LlamaForCausalLM,
        LlamaConfig,
        {
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
    ),
}


def write_weights(geometry: Geometry, folder: Path) -> None:
    """Write config.json and random bfloat16 weights, the same ones each time; embedding and head are tied."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    config = geometry.config(bos_token_id=0, eos_token_id=2, tie_word_embeddings=True, **geometry.keys)
    model = geometry.model(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0, BIAS_DEVIATION)
    model.save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the standard library's top-level modules and write it with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END_OF_TURN,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_weights(GEOMETRIES[args.geometry], args.folder)
    write_tokenizer(args.folder)


if __name__ == "__main__":
    main()
