"""Gemma: Llama with a tied head, embeddings times the root of their width, norm weights minus one, and a gated GELU."""

from dataclasses import replace

from llmc.export.config import DecoderConfig, NormConfig
from llmc.export.keys import Keys
from llmc.export.reading import ACTIVATIONS, read_decoder

GELU = {**ACTIVATIONS, "gelu": "gelu_tanh"}


def read(keys: Keys) -> DecoderConfig:
    """The first configs have ``gelu`` but mean its approximation, which ``hidden_activation`` names."""
    bias = keys.flag("attention_bias")
    if keys.raw("hidden_activation") is not None:
        keys.choice("hidden_activation", ("gelu_pytorch_tanh",))
    config = read_decoder(
        keys,
        default_kv_heads=16,
        default_head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig(keys.number("rms_norm_eps", 1e-6), offset=True),
        activations=GELU,
        default_tied=True,
    )
    return replace(config, embedding_scale=config.hidden_size**0.5)
