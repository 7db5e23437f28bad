"""GLM-4: norms before and behind attention and MLP, half of each head rotated as neighbours, and a packed MLP."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import NormConfig, Placement
from llmc.export.reading import read_decoder

PLACEMENT = Placement("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def read(keys: Keys) -> DecoderConfig:
    """``attention_bias`` covers only q, k and v."""
    config = read_decoder(
        keys,
        default_kv_heads=2,
        default_head_dim=128,
        qkv_bias=keys.flag("attention_bias", True),
        norm=NormConfig(keys.number("rms_norm_eps", 1.5625e-07)),
        placement=PLACEMENT,
        partial=0.5,
        interleaved=True,
    )
    return replace(config, packed=(("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),))
