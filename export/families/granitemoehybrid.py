"""Granite 4 without experts: layers of Mamba 2 or of attention, each with an MLP whose first product is packed."""

from dataclasses import replace

from llmc.export.config import DecoderConfig, RecurrentConfig
from llmc.export.families.granite import apply_multipliers
from llmc.export.families.hybrids import recurrent_layers
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder

ROUTER = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
PACKED = (
    ("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),
    ("recurrent.all_proj", ("recurrent.gate_proj", "recurrent.in_proj", "recurrent.decay_proj")),
)
RENAMED = (
    *(("shared_mlp.output_linear", "mlp.down_proj"), ("mamba.in_proj", "recurrent.all_proj")),
    *(("mamba.conv1d", "recurrent.conv"), ("mamba", "recurrent")),
)
KINDS = "mamba", "linear_attention"
SIZES = "n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "conv_bias", "proj_bias"
# As transformers writes it into JSON, which has no infinity.
ENDLESS = (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")])


def read(keys: Keys) -> DecoderConfig:
    """The only MLP is the shared one. Without ``position_embedding_type`` nothing is rotated."""
    keys.skip(*ROUTER, "intermediate_size", "init_method", "mamba_chunk_size")
    layers, experts = keys.integer("num_hidden_layers"), keys.raw("num_local_experts")
    if experts != 0:
        raise keys.error("num_local_experts", experts, "0, since mixtures of experts are not supported")
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
    types, config = keys.raw("layer_types"), apply_multipliers(config, keys)
    attends = types is not None and set(map(str, types)).isdisjoint(KINDS)
    keys.skip(*(f"mamba_{name}" for name in SIZES), "time_step_limit")
    mixer = None if attends else _mixer(keys, config.hidden_size)  # without such layers its sizes fit no model
    recurrent = recurrent_layers(keys, config.layers, mixer, KINDS, (True,) * layers)
    return replace(config, layers=recurrent, packed=PACKED, renamed=RENAMED)


def _mixer(keys: Keys, hidden_size: int) -> RecurrentConfig:
    """Mamba 2 in one group, with steps of any size."""
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    inner = keys.integer("mamba_expand", 2) * hidden_size
    width, stated = inner // heads, keys.raw("mamba_d_head")
    if groups != 1:
        raise keys.error("mamba_n_groups", groups, "1")
    if stated not in (None, "auto", width) or width * heads != inner:
        raise keys.error("mamba_d_head", stated, f"{inner} values in all of mamba_n_heads={heads} heads")
    if keys.flag("mamba_proj_bias"):
        raise keys.error("mamba_proj_bias", True, "false")
    if (limit := keys.raw("time_step_limit")) not in ENDLESS:
        raise keys.error("time_step_limit", limit, "steps without a limit")
    state = keys.integer("mamba_d_state", 256)
    return RecurrentConfig(
        rule="mamba2",
        channels=inner + 2 * state,
        taps=keys.integer("mamba_d_conv", 4),
        key_heads=1,
        value_heads=heads,
        key_dim=state,
        value_dim=width,
        bias=keys.flag("mamba_conv_bias", True),
    )
