"""ERNIE 4.5's dense models: Llama whose rope rotates neighbours, with one switch for all biases and a tied head."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """transformers' default of head_dim is 128."""
    bias = keys.flag("use_bias")
    return read_decoder(
        keys,
        default_head_dim=128,
        bias=bias,
        mlp_bias=bias,
        default_theta=500_000.0,
        default_tied=True,
        interleaved=True,
    )
