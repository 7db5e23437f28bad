"""Llama 2 and 3, and the many checkpoints that call themselves ``llama``."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """Biases are configurable. Llama 1 has no ``num_key_value_heads``."""
    return read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )
