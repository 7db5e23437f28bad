"""Gemma 4 12B: gemma4_text without inputs for each layer; what makes rows of images and sounds is left out."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import gemma4_text, read_text_part
from llmc.export.families.gemma4 import MORE, OTHER_PARTS
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip(*OTHER_PARTS, *MORE)
    config = read_text_part(keys, ("gemma4_unified_text",))
    return replace(config, left_out=(*config.left_out, "vision_embedder", "embed_vision", "embed_audio"))


def read_text(keys: Keys) -> DecoderConfig:
    return gemma4_text.read(keys, default_per_layer=0)
