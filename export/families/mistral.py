"""Mistral 7B and its kin: Llama with one sliding window for all layers, or none."""

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import read_decoder, same_window


def read(keys: Keys) -> DecoderConfig:
    """``sliding_window`` must be said, be it null: transformers would take 4096 for a missing one."""
    return read_decoder(keys, windows=same_window(keys))
