"""Gemma 3 from 4B on: gemma3_text as the text part of a vision-language model; only that part is exported."""

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.keys import Keys

# transformers' defaults: published configs leave these keys out.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read(keys: Keys) -> DecoderConfig:
    """Text is read as in the smaller models (attention is bidirectional only over images)."""
    return read_text_part(keys, ("gemma3_text",), DEFAULTS)
