"""Qwen2 and Qwen2.5: biases on q, k and v; optional sliding windows from some layer on."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, windows_from_layer


def read(keys: Keys) -> DecoderConfig:
    """The biases are not configurable."""
    return read_decoder(keys, windows=windows_from_layer(keys), qkv_bias=True)
