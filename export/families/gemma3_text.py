"""Gemma 3: Gemma with norms on both sides and on the heads of q and k, windows in five layers of six, and two ropes."""

from dataclasses import replace

from llmc.export.config import SANDWICH, DecoderConfig, NormConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """Scaling applies to the full-attention layers; windowed layers have another base."""
    keys.skip("cache_implementation", "_sliding_window_pattern")
    if keys.optional_number("attn_logit_softcapping") is not None:
        keys.leave_out("attn_logit_softcapping", "is not applied by transformers")
    bias = keys.flag("attention_bias")
    config = read_decoder(
        keys,
        windows=windows_by_pattern(keys, default=6),
        default_kv_heads=4,
        default_head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norm=NormConfig(keys.number("rms_norm_eps", 1e-6), offset=True),
        placement=SANDWICH,
        activation_key="hidden_activation",
        default_theta=1_000_000.0,
        local_theta=("rope_local_base_freq", 10_000.0),
        default_tied=True,
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )
    final = keys.optional_number("final_logit_softcapping") or 0.0
    config = replace(config, embedding_scale=config.hidden_size**0.5, logit_softcap=final)
    return both_ways(config) if keys.flag("use_bidirectional_attention") else config


def both_ways(config: DecoderConfig) -> DecoderConfig:
    """Bidirectional attention; a window covers half as many positions on each side."""
    return config.change_attentions(
        lambda _, it: replace(it, causal=False, window=it.window // 2 + 1 if it.window else 0)
    )
