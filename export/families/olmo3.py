"""OLMo 3: OLMo 2 with windows in three layers of four, whose rope is never scaled."""

from llmc.export.config import POST, DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """Both ropes have one base, unless ``rope_parameters`` says otherwise."""
    bias = keys.flag("attention_bias")
    return read_decoder(
        keys,
        windows=windows_by_pattern(keys, default=4),
        default_kv_heads=keys.integer("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="whole",
        placement=POST,
        default_theta=500_000.0,
        local_theta=("rope_theta", 500_000.0),
    )
