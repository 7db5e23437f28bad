"""Gemma 3: Gemma with norms on both sides and on the heads of q and k, windows in five layers of six, and two ropes."""

from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.families.gemma import read_gemma
from llmc.export.keys import Keys
from llmc.export.parts.norm import SANDWICH
from llmc.export.reading import windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """Scaling applies to the full-attention layers; windowed layers have another base."""
    keys.skip("cache_implementation", "_sliding_window_pattern")
    if keys.optional_number("attn_logit_softcapping") is not None:
        keys.leave_out("attn_logit_softcapping", "is not applied by transformers")
    config = read_sandwich(
        keys, windows=windows_by_pattern(keys, default=6), scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    )
    return attend_to_all(config) if keys.flag("use_bidirectional_attention") else config


def read_sandwich(keys: Keys, **differences: Any) -> DecoderConfig:
    """The part common to Gemma 3 and 4; ``differences`` are keywords of :func:`read_gemma`."""
    config = read_gemma(
        keys,
        qk_norm="head",
        placement=SANDWICH,
        activation_key="hidden_activation",
        default_theta=1_000_000.0,
        local_theta=("rope_local_base_freq", 10_000.0),
        **differences,
    )
    return replace(config, logit_softcap=keys.optional_number("final_logit_softcapping") or 0.0)


def attend_to_all(config: DecoderConfig) -> DecoderConfig:
    """Bidirectional attention; a window covers half as many positions on each side."""
    return config.change_attentions(
        lambda _, it: replace(it, causal=False, window=it.window // 2 + 1 if it.window else 0)
    )
