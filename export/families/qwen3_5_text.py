"""Qwen3.5: three layers of the gated delta rule for each one of attention, whose output has a gate."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.hybrids import read_delta, recurrent_layers
from llmc.export.keys import Keys
from llmc.export.parts.norm import NormConfig
from llmc.export.reading import read_decoder

RENAMED = (
    *(("linear_attn.in_proj_qkv", "recurrent.in_proj"), ("linear_attn.in_proj_z", "recurrent.gate_proj")),
    *(("linear_attn.in_proj_b", "recurrent.beta_proj"), ("linear_attn.in_proj_a", "recurrent.decay_proj")),
    *(("linear_attn.conv1d", "recurrent.conv"), ("linear_attn", "recurrent")),
)


def read(keys: Keys, inner: int | None = None) -> DecoderConfig:
    """Positions on several axes are those of plain text; layers that predict further tokens (``mtp``) are left out.

    MLPs are ``inner`` wide, by default as the config says.
    """
    keys.fixed("attn_output_gate", True)
    keys.choice("hidden_act", ("silu",), "silu")  # of the convolutions too
    keys.skip("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers")
    key_heads, value_heads = keys.integer("linear_num_key_heads", 16), keys.integer("linear_num_value_heads", 32)
    key_dim, value_dim = keys.integer("linear_key_head_dim", 128), keys.integer("linear_value_head_dim", 128)
    config = read_decoder(
        keys,
        default_kv_heads=4,
        default_head_dim=256,
        bias=keys.flag("attention_bias"),
        qk_norm="head",
        norm=NormConfig(keys.number("rms_norm_eps", 1e-6), offset=True),
        partial=0.25,
        inner=inner,
        rope_own=("mrope_section", "mrope_interleaved"),
    )
    mixer = read_delta(keys, key_heads, value_heads, key_dim, value_dim)
    every = keys.integer("full_attention_interval", 4)
    default = tuple((i + 1) % every != 0 for i in range(len(config.layers)))
    config = config.change_attentions(lambda _, it: replace(it, gate="beside_queries"))
    layers = recurrent_layers(keys, config.layers, mixer, ("linear_attention",), default)
    return replace(config, layers=layers, renamed=RENAMED, left_out=("mtp",))
