"""OLMo 2: Llama with norms behind attention and MLP, and over all heads of q and k together."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import POST
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """``attention_bias`` covers q, k, v and o."""
    return read_decoder(
        keys,
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        qk_norm="whole",
        placement=POST,
    )
