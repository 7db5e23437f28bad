"""OLMo-Hybrid: OLMo 3's attention in every fourth layer, the gated delta rule with norms before its parts in others."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.hybrids import read_delta, recurrent_layers
from llmc.export.keys import Keys
from llmc.export.parts.norm import POST, PRE
from llmc.export.reading import read_decoder

# Keys of the initialisation.
UNREAD = ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
RENAMED = (
    *(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
    *(("linear_attn", "recurrent"), ("linear_attn.g_proj", "recurrent.gate_proj")),
    *(("linear_attn.b_proj", "recurrent.beta_proj"), ("linear_attn.a_proj", "recurrent.decay_proj")),
    *(("linear_attn.o_norm", "recurrent.norm"), ("linear_attn.o_proj", "recurrent.out_proj")),
    *((f"linear_attn.{part}_conv1d", f"recurrent.{part}_conv") for part in "qkv"),
)
EPS = 1e-5  # of the norm behind the recurrence. Source: transformers, olmo_hybrid


def read(keys: Keys) -> DecoderConfig:
    """Positions are not encoded if the rope's base is null, as converters write it."""
    keys.skip(*UNREAD)
    keys.choice("hidden_act", ("silu",), "silu")  # of the convolutions too
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    ropes = keys.inside("rope_parameters") if keys.raw("rope_parameters") is not None else keys
    rotates = "rope_theta" not in ropes or ropes.raw("rope_theta") is not None
    config = read_decoder(
        keys,
        default_kv_heads=heads,
        bias=keys.flag("attention_bias"),
        qk_norm="whole",
        placement=POST,
        rotated=(rotates,) * layers,
    )
    key_heads, value_heads = keys.integer("linear_num_key_heads", heads), keys.integer("linear_num_value_heads", heads)
    key_dim = keys.integer("linear_key_head_dim", int(0.75 * config.hidden_size / key_heads))
    value_dim = keys.integer("linear_value_head_dim", 2 * key_dim)
    mixer = replace(
        read_delta(keys, key_heads, value_heads, key_dim, value_dim),
        apart=True,
        beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=EPS,
    )
    default = tuple(i % 4 != 3 for i in range(layers))
    mixed = recurrent_layers(keys, config.layers, mixer, ("linear_attention",), default)
    return replace(
        config,
        layers=tuple(replace(layer, placement=PRE) if layer.recurrent else layer for layer in mixed),
        renamed=RENAMED,
    )
