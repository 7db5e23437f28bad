"""Mistral 7B and its kin: Llama with one sliding window for all layers, or none."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder


def read(keys: Keys) -> DecoderConfig:
    """``sliding_window`` must be given, even as null: transformers' default is 4096."""
    window = keys.nullable_integer("sliding_window")
    return read_decoder(keys, windows=(window,) * keys.integer("num_hidden_layers"))
