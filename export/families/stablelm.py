"""StableLM: Llama with layer norms and a quarter of each head rotated; attention and MLP may stand side by side."""

from llmc.export.config import PARALLEL, PRE, DecoderConfig, NormConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """Only StableLM 2 12B has ``qk_layernorm``; each of its heads has its own norm weights."""
    if keys.flag("qk_layernorm"):
        raise keys.error("qk_layernorm", True, "false, since norms with weights for each head are not supported")
    return read_decoder(
        keys,
        default_kv_heads=32,
        qkv_bias=keys.flag("use_qkv_bias"),
        norm=NormConfig(keys.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement=PARALLEL if keys.flag("use_parallel_residual") else PRE,
        partial=0.25,
    )
