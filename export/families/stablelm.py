"""StableLM: Llama with layer norms and a quarter of each head rotated; attention and MLP may stand side by side."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import PARALLEL, PRE, NormConfig
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """Only StableLM 2 12B has ``qk_layernorm``; each of its heads has its own norm weights."""
    normed = keys.flag("qk_layernorm")
    config = read_decoder(
        keys,
        default_kv_heads=32,
        qkv_bias=keys.flag("use_qkv_bias"),
        norm=NormConfig(keys.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement=PARALLEL if keys.flag("use_parallel_residual") else PRE,
        partial=0.25,
    )
    if not normed:
        return config
    config = config.change_attentions(lambda _, it: replace(it, qk_norm="head", qk_scales=True))
    return replace(config, renamed=tuple((f"{part}_layernorm.norms", f"{part}_norm") for part in "qk"))
