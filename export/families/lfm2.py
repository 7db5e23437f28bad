"""LFM2 and LFM2.5: gated short convolutions, and attention in a few layers."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.hybrids import recurrent_layers
from llmc.export.keys import Keys
from llmc.export.parts.norm import Placement
from llmc.export.parts.recurrent import RecurrentConfig
from llmc.export.reading import read_decoder

KEYS = {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
# Keys that the decoder does not depend on: its initialisation, and other names of sizes.
UNREAD = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
)
RENAMED = (
    *(("conv.conv", "recurrent.conv"), ("conv", "recurrent"), ("embedding_norm", "norm")),
    *(("self_attn.out_proj", "self_attn.o_proj"), ("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")),
    *(("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj")),
)


def read(keys: Keys, inner: int = 0) -> DecoderConfig:
    """``intermediate_size`` may be one from which the width of MLPs is computed, unless ``inner`` is it."""
    keys.rename(KEYS)
    keys.skip(*UNREAD)
    layers, attending = keys.integer("num_hidden_layers"), keys.raw("full_attn_idxs")
    config = read_decoder(
        keys,
        default_kv_heads=8,
        qk_norm="head",
        placement=Placement("operator_norm", "", "ffn_norm", ""),
        inner=inner or _inner(keys),
        default_activation="silu",
        default_theta=1_000_000.0,
        default_tied=True,
    )
    attending = list(range(layers)) if attending is None else attending
    if not isinstance(attending, list) or any(index not in range(layers) for index in attending):
        raise keys.error("full_attn_idxs", attending, f"indices of the {layers} layers")
    default, mixer = tuple(i not in attending for i in range(layers)), read_conv(keys, config.hidden_size)
    return replace(config, layers=recurrent_layers(keys, config.layers, mixer, ("conv",), default), renamed=RENAMED)


def read_conv(keys: Keys, channels: int, default_taps: int = 3) -> RecurrentConfig:
    """The short convolution."""
    taps, bias = keys.integer("conv_L_cache", default_taps), keys.flag("conv_bias")
    return RecurrentConfig(rule="conv", channels=channels, taps=taps, bias=bias)


def _inner(keys: Keys) -> int:
    """Two thirds of the stated width, times a factor, rounded up, unless it is to be taken as it is."""
    inner, factor = keys.integer("intermediate_size"), keys.number("block_ffn_dim_multiplier", 1.0)
    multiple = keys.integer("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
