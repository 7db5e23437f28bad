"""Tiny checkpoints with random weights of any family that transformers has, in the files that transformers writes.

Names, stacks and types of tensors are transformers' own, so that reading them is tested; llmc's list of shapes
(:attr:`DecoderConfig.parameter_shapes`) has the names of after the reading and serves families that transformers
has not.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SMALL_MODEL = Path(__file__).parents[2] / "recipes" / "tiny" / "checkpoint"
BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,  # divides into blocks of int4
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def draw(model: Any) -> Any:
    """Give a model of torch random weights: vectors around one, the rest large enough to make every part matter."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.25)
    return model


def make(model_type: str, auto: str = "AutoModelForCausalLM", seed: int = 0, **config: Any) -> Any:
    """A random model of torch; ``config`` is added to :data:`BASE`, or is all of a model of several parts."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {} if "text_config" in config else BASE
    made = transformers.AutoConfig.for_model(model_type, **{**sizes, **config})
    return draw(getattr(transformers, auto).from_config(made))


def tiny(
    folder: Path,
    model_type: str,
    auto: str = "AutoModelForCausalLM",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_size: str = "1GB",
    tokens: Iterable[str] | None = None,
    **config: Any,
) -> Path:
    """Write a random checkpoint.

    Args:
        folder: is made where it is missing.
        auto: transformers' class that saves it.
        tokens: special tokens behind the small model's, which has 4,096; with None the tokenizer has no tokens.
        config: keys of its config, added to :data:`BASE` where it has no ``text_config``.
    """
    import torch

    model = make(model_type, auto, seed, **config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, tokens)
    return folder


def write_tokenizer(folder: Path, tokens: Iterable[str] | None = None) -> None:
    """Write the small model's tokenizer with special tokens behind its own, or with None one without tokens."""
    if tokens is None:
        text = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
        (folder / "tokenizer.json").write_text(text)
        return
    tokenizer = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(SMALL_MODEL / name, folder / name)
