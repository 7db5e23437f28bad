"""Mistral 7B and its kin: Llama with one sliding window for all layers, or none."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder
from llmc.export.rope_keys import DEFAULT_THETA


def read(keys: Keys, default_theta: float = DEFAULT_THETA) -> DecoderConfig:
    """``sliding_window`` must be given, even as null: transformers' default is 4096."""
    window = keys.sliding_window()
    return read_decoder(keys, windows=(window,) * keys.integer("num_hidden_layers"), default_theta=default_theta)
