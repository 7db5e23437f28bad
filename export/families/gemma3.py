"""Gemma 3 from 4B on: gemma3_text inside a model that also sees, of which the text part is exported."""

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.keys import Keys

# transformers' own, for published configs leave them out.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read(keys: Keys) -> DecoderConfig:
    """Images aside, which are read both ways, its text is read as that of the smaller models."""
    return read_text_part(keys, ("gemma3_text",), DEFAULTS)
