"""Mistral Small from 3.1 on, Ministral 3 and Devstral 2: a Mistral as the text part of a vision-language model."""

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` names the family of the text part, which is exported."""
    return read_text_part(keys, ("mistral", "ministral3", "mistral4"))
