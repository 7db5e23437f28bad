"""OLMo 3: OLMo 2 with windows in three layers of four, whose rope is never scaled."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import POST
from llmc.export.reading import read_decoder, windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """Both ropes have one base, unless ``rope_parameters`` says otherwise."""
    return read_decoder(
        keys,
        windows=windows_by_pattern(keys, default=4),
        default_kv_heads=keys.integer("num_attention_heads"),
        bias=keys.flag("attention_bias"),
        qk_norm="whole",
        placement=POST,
        default_theta=500_000.0,
        local_theta=("rope_theta", 500_000.0),
    )
