"""EXAONE 4: Llama with norms behind attention and MLP and on heads of q and k; only windowed layers are rotated."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.parts.norm import POST
from llmc.export.reading import read_decoder, windows_by_pattern, windows_by_type


def read(keys: Keys) -> DecoderConfig:
    """Without windows all layers are rotated. A pattern in letters repeats ``layer_types``."""
    window = keys.sliding_window()
    if keys.raw("layer_types") is None and window:
        windows = windows_by_pattern(keys, default=4)
    else:
        keys.skip("sliding_window_pattern")
        windows = windows_by_type(keys, window, (False,) * keys.integer("num_hidden_layers"))
    return read_decoder(
        keys, windows=windows, rotated=tuple(not window or bool(own) for own in windows), qk_norm="head", placement=POST
    )
