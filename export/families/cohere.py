"""Command R and Aya: attention and MLP side by side behind one layer norm without bias, and scaled logits."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import PARALLEL, NormConfig
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """Only Command R+ has ``use_qk_norm``; each of its heads has its own norm weights."""
    config, normed = read_parallel(keys), keys.flag("use_qk_norm")
    return config.change_attentions(lambda _, it: replace(it, qk_norm="head", qk_scales=True)) if normed else config


def read_parallel(
    keys: Keys, windows: tuple[int, ...] | None = None, rotated: tuple[bool, ...] | None = None
) -> DecoderConfig:
    """The part common to all Command models; the keywords are those of :func:`read_decoder`."""
    bias = keys.flag("attention_bias")
    config = read_decoder(
        keys,
        windows=windows,
        rotated=rotated,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=bias,
        norm=NormConfig(keys.number("layer_norm_eps", 1e-5), "layer"),
        placement=PARALLEL,
        default_tied=True,
        interleaved=True,
    )
    return replace(config, logit_scale=keys.number("logit_scale", 0.0625))
