"""Gemma 2: Gemma with norms on both sides of attention and MLP, softcaps, and windows in every second layer."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.gemma import read_gemma
from llmc.export.keys import Keys
from llmc.export.parts.norm import SANDWICH
from llmc.export.reading import windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """``hidden_activation`` counts, not ``hidden_act``; a softcap of null is none."""
    keys.skip("hidden_act", "cache_implementation")
    config = read_gemma(
        keys,
        windows=windows_by_pattern(keys, default=2),
        placement=SANDWICH,
        activation_key="hidden_activation",
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=keys.nullable_number("attn_logit_softcapping", 50.0),
    )
    return replace(config, logit_softcap=keys.nullable_number("final_logit_softcapping", 30.0))
