"""Granite 3: Llama with four multipliers, of embeddings, residuals, attention's products and logits."""

from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys, **differences: Any) -> DecoderConfig:
    """Biases are configurable, as in Llama; ``differences`` are keywords of :func:`read_decoder`."""
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        scale=keys.number("attention_multiplier", 1.0),
        **differences,
    )
    return apply_multipliers(config, keys)


def apply_multipliers(config: DecoderConfig, keys: Keys) -> DecoderConfig:
    """``attention_multiplier`` replaces head_dim ** -0.5; logits are divided by ``logits_scaling``."""
    return replace(
        config,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )
