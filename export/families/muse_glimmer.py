"""Muse Glimmer: windows in three layers of four, no positions in the fourth, and a gate for each value of attention.

Its text part; the tower is left out.
"""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.parts.norm import SANDWICH, NormConfig
from llmc.export.reading import read_decoder, windows_by_type

RENAMED = (("self_attn.gate_proj", "self_attn.g_proj"),)


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by :func:`read_text`."""
    keys.skip("video_token_id", "out_hidden_size")
    return read_text_part(keys, ("muse_glimmer_text",), default_tied=False)


def read_text(keys: Keys) -> DecoderConfig:
    """All ropes have the base of ``rope_parameters``; ``layer_rope_theta`` says in which layers there is none."""
    layers, bias = keys.integer("num_hidden_layers"), keys.flag("attention_bias")
    rotated = _list_rotated(keys, layers)
    config = read_decoder(
        keys,
        windows=windows_by_type(keys, keys.sliding_window(), rotated),
        default_kv_heads=2,
        default_head_dim=128,
        bias=bias,
        qk_norm="unweighted_head",
        norm=NormConfig(keys.number("rms_norm_eps", 1e-5), offset=True, plain_end=True),
        placement=replace(SANDWICH, eps_after=keys.number("post_norm_eps", 1e-8)),
        activation_key="hidden_activation",
        default_activation="silu",
        rotated=rotated,
        scale=keys.integer("head_dim", 128) ** -0.5 * keys.number("qk_scale_factor", 3.87),
    )
    config = config.change_attentions(lambda _, it: replace(it, gate="value"))
    return replace(
        config,
        embedding_normed=True,
        logit_scale=keys.number("output_multiplier", 0.19611613513818404),
        logit_softcap=keys.number("final_logit_softcapping", 20.0),
        renamed=RENAMED,
        left_out=("vision_adapter", "vision_projection"),
    )


def _list_rotated(keys: Keys, layers: int) -> tuple[bool, ...]:
    stated = keys.raw("layer_rope_theta")
    if stated is None:
        return tuple((layers - 1 - i) % 4 != 0 for i in range(layers))
    if not isinstance(stated, list) or len(stated) != layers or any(type(it) not in (int, float) for it in stated):
        raise keys.error("layer_rope_theta", stated, f"{layers} bases, 0 in layers without positions")
    return tuple(base != 0 for base in stated)
