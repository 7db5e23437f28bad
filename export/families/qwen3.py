"""Qwen3: RMS norms on each head of q and k, and an explicit head_dim."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_from_layer


def read(keys: Keys) -> DecoderConfig:
    """``attention_bias`` covers q, k, v and o; transformers' default of head_dim is 128."""
    return read_decoder(
        keys, windows=windows_from_layer(keys), default_head_dim=128, bias=keys.flag("attention_bias"), qk_norm="head"
    )
