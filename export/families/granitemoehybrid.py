"""Granite 4: layers of Mamba 2 or of attention, each with an MLP whose first product is packed, and experts if any."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import granitemoe, hybrids
from llmc.export.families.granite import apply_multipliers
from llmc.export.families.mixtures import TRAINING, put_experts, read_experts
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

PACKED = (("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")), *hybrids.PACKED)
RENAMED = (("shared_mlp.output_linear", "mlp.down_proj"), *hybrids.RENAMED, *granitemoe.RENAMED)
KINDS = "mamba", "linear_attention"


def read(keys: Keys) -> DecoderConfig:
    """Experts are ``intermediate_size`` wide. Without ``position_embedding_type`` nothing is rotated."""
    keys.rename({"num_local_experts": "num_experts"})
    keys.skip(*TRAINING, "num_experts_per_tok", "intermediate_size", "init_method")
    layers = keys.integer("num_hidden_layers")
    rotated = keys.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        inner=keys.integer("shared_intermediate_size", 1024),
        rotated=(rotated,) * layers,
        scale=keys.number("attention_multiplier", 1.0),
    )
    if keys.raw("num_experts") != 0:
        experts = read_experts(keys, keys.integer("intermediate_size"), normalized=True, count=8)
        config = put_experts(config, experts, shared=config.layers[0].mlp)
    types, config = keys.raw("layer_types"), apply_multipliers(config, keys)
    attends = isinstance(types, list) and set(map(str, types)).isdisjoint(KINDS)
    keys.skip(*(f"mamba_{name}" for name in hybrids.SIZES), "time_step_limit")
    inner = keys.integer("mamba_expand", 2) * config.hidden_size
    mixer = None if attends else hybrids.read_mamba(keys, inner)  # without such layers its sizes fit no model
    recurrent = hybrids.recurrent_layers(keys, config.layers, mixer, KINDS, (True,) * layers)
    return replace(config, layers=recurrent, packed=PACKED, renamed=RENAMED)
