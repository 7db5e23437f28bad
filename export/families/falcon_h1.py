"""Falcon-H1: attention and Mamba 2 side by side in every layer behind one norm, and many multipliers."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import hybrids
from llmc.export.keys import Keys
from llmc.export.parts.norm import Placement
from llmc.export.reading import read_decoder

RENAMED = (*hybrids.RENAMED, ("feed_forward", "mlp"), ("final_layernorm", "norm"))


def read(keys: Keys) -> DecoderConfig:
    """Linears add no bias, so that multipliers of what they read are multipliers of what they make."""
    keys.skip("layer_types", "layers_block_type", "num_logits_to_keep", "mlp_expansion_factor")
    for name, wanted in (("projectors_bias", False), ("mlp_bias", False), ("mamba_use_mlp", True)):
        keys.fixed(name, wanted)
    read = keys.number("attention_in_multiplier", 1.0)  # by queries, keys and values
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        placement=Placement("input_layernorm", "", "pre_ff_layernorm", ""),
    )
    gate, down = _read_list(keys, "mlp_multipliers", 2)
    inner = keys.integer("mamba_d_ssm", keys.integer("mamba_expand", 2) * config.hidden_size)
    recurrent = replace(
        hybrids.read_mamba(keys, inner),
        gate_first=not keys.flag("mamba_norm_before_gate", True),
        normed=keys.flag("mamba_rms_norm"),
        scales=tuple(keys.number("ssm_in_multiplier", 1.0) * it for it in _read_list(keys, "ssm_multipliers", 5)),
    )
    layer = config.layers[0]
    assert layer.attention is not None and layer.mlp is not None
    scale = read * read * keys.number("key_multiplier", 1.0) * layer.attention.head_dim**-0.5
    layer = replace(
        layer,
        attention=replace(layer.attention, scale=scale),
        attention_scale=read * keys.number("attention_out_multiplier", 1.0),
        recurrent=recurrent,
        recurrent_scale=keys.number("ssm_out_multiplier", 1.0),
        mlp=replace(layer.mlp, gate_scale=gate, scale=down),
    )
    return replace(
        config,
        layers=(layer,) * len(config.layers),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
        packed=hybrids.PACKED,
        renamed=RENAMED,
    )


def _read_list(keys: Keys, name: str, count: int) -> tuple[float, ...]:
    values = keys.numbers(name) if keys.raw(name) is not None else (1.0,) * count
    if len(values) != count:
        raise keys.error(name, list(values), f"{count} numbers")
    return values
