"""Granite 4 without experts and recurrent layers, as its micro models are: Granite 3 with a packed MLP."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.granite import apply_multipliers
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

RECURRENT = (
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
    *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
)
ROUTER = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


def read(keys: Keys) -> DecoderConfig:
    """The only MLP is the shared one. Without ``position_embedding_type`` nothing is rotated."""
    keys.skip(*RECURRENT, *ROUTER, "intermediate_size", "init_method")
    layers, types, experts = keys.integer("num_hidden_layers"), keys.raw("layer_types"), keys.raw("num_local_experts")
    if experts != 0:
        raise keys.error("num_local_experts", experts, "0, since mixtures of experts are not supported")
    if not isinstance(types, list) or len(types) != layers or set(types) - {"attention", "full_attention"}:
        raise keys.error("layer_types", types, f"{layers} times 'attention', since recurrent layers are not supported")
    rotated = keys.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    bias = keys.flag("attention_bias")
    config = read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        inner=keys.integer("shared_intermediate_size", 1024),
        rotated=(rotated,) * layers,
        scale=keys.number("attention_multiplier", 1.0),
    )
    return replace(
        apply_multipliers(config, keys),
        packed=(("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),),
        renamed=(("shared_mlp.output_linear", "mlp.down_proj"),),
    )
