"""Gemma 4 as published: gemma4_text as the text part of a model that sees and hears; only that part is exported."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.keys import Keys

OTHER_PARTS = ("audio_config", "audio_token_id", "boa_token_id", "boa_token_index", "boi_token_id", "eoa_token_id")
MORE = ("eoa_token_index", "eoi_token_id", "video_token_id", "vision_soft_tokens_per_image")


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip(*OTHER_PARTS, *MORE)
    config = read_text_part(keys, ("gemma4_text",))
    return replace(config, left_out=(*config.left_out, "audio_tower", "embed_vision", "embed_audio"))
