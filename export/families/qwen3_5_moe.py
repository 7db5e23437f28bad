"""Qwen3.5 with experts as published: the text part of a model that sees images; only that part is exported."""

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip("video_token_id", "vision_start_token_id", "vision_end_token_id")
    return read_text_part(keys, ("qwen3_5_moe_text",), default_tied=False)
