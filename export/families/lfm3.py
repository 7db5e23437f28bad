"""LFM3: LFM2 with windows in every fourth layer, norms on both sides of each part, and a gate for each head."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import lfm2
from llmc.export.families.hybrids import recurrent_layers
from llmc.export.keys import Keys
from llmc.export.parts.norm import Placement
from llmc.export.reading import read_decoder
from llmc.export.rope_keys import require_both_ropes

RENAMED = (*lfm2.RENAMED, ("self_attn.gate_proj", "self_attn.g_proj"))
KINDS = ("full_attention", "sliding_attention")


def read(keys: Keys) -> DecoderConfig:
    """``layer_types`` must be given: it names windows and convolutions."""
    keys.rename(lfm2.KEYS)
    require_both_ropes(keys)
    layers, types, window = keys.integer("num_hidden_layers"), keys.raw("layer_types"), keys.sliding_window()
    if not isinstance(types, list) or len(types) != layers:
        raise keys.error("layer_types", types, f"{layers} entries, each one of conv, {', '.join(KINDS)}")
    after = ("post_operator_norm", "post_ffn_norm") if keys.flag("use_sandwich_norm", True) else ("", "")
    config = read_decoder(
        keys,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in types),
        default_kv_heads=4,
        default_head_dim=128,
        bias=keys.flag("attention_bias"),
        qk_norm="head",
        placement=Placement("operator_norm", after[0], "ffn_norm", after[1]),
        default_activation="silu",
        default_theta=1_000_000.0,
        default_tied=True,
        local_theta=("rope_theta", 10_000.0),
    )
    if keys.flag("use_attention_gate", True):
        config = config.change_attentions(lambda _, it: replace(it, gate="head"))
    mixer = lfm2.read_conv(keys, config.hidden_size, default_taps=7)
    mixed = recurrent_layers(keys, config.layers, mixer, ("conv",), (), KINDS)
    return replace(config, layers=mixed, renamed=RENAMED)
