"""Seed-OSS: Llama with a bias on q, k and v, and another switch for the one on o."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """transformers' default of head_dim is 128. ``residual_dropout`` is for training."""
    keys.skip("residual_dropout")
    return read_decoder(
        keys,
        default_head_dim=128,
        qkv_bias=keys.flag("attention_bias", True),
        o_bias=keys.flag("attention_out_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )
