"""Gemma: Llama with a tied head, embeddings times the root of their width, norm weights minus one, and a gated GELU."""

from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import NormConfig
from llmc.export.reading import ACTIVATIONS, read_decoder

GELU = {**ACTIVATIONS, "gelu": "gelu_tanh"}


def read(keys: Keys) -> DecoderConfig:
    """The first configs have ``gelu`` but mean its approximation, which ``hidden_activation`` names."""
    if keys.raw("hidden_activation") is not None:
        keys.choice("hidden_activation", ("gelu_pytorch_tanh",))
    return read_gemma(keys, default_kv_heads=16, activations=GELU)


def read_gemma(keys: Keys, *, default_kv_heads: int = 4, offset: bool = True, **differences: Any) -> DecoderConfig:
    """The part common to all Gemmas. ``differences`` are keywords of :func:`read_decoder`; ``offset``: norm weights are
    stored minus one."""
    config = read_decoder(
        keys,
        default_kv_heads=default_kv_heads,
        default_head_dim=256,
        bias=keys.flag("attention_bias"),
        norm=NormConfig(keys.number("rms_norm_eps", 1e-6), offset=offset),
        default_tied=True,
        **differences,
    )
    return replace(config, embedding_scale=config.hidden_size**0.5)
