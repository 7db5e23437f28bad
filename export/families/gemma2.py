"""Gemma 2: Gemma with norms on both sides of attention and MLP, softcaps, and windows in every second layer."""

from dataclasses import replace

from llmc.export.config import SANDWICH, DecoderConfig, NormConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """``hidden_activation`` counts, not ``hidden_act``; a softcap of null is none."""
    keys.skip("hidden_act", "cache_implementation")
    bias = keys.flag("attention_bias")
    config = read_decoder(
        keys,
        windows=windows_by_pattern(keys, default=2),
        default_kv_heads=4,
        default_head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig(keys.number("rms_norm_eps", 1e-6), offset=True),
        placement=SANDWICH,
        activation_key="hidden_activation",
        default_tied=True,
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=keys.nullable_number("attn_logit_softcapping", 50.0),
    )
    final = keys.nullable_number("final_logit_softcapping", 30.0)
    return replace(config, embedding_scale=config.hidden_size**0.5, logit_softcap=final)
