"""Gemma 4 as published: the text part of a model that sees and hears; only that part is exported."""

from dataclasses import replace

from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys

OTHER_PARTS = ("audio_config", "audio_token_id", "boa_token_id", "boa_token_index", "boi_token_id", "eoa_token_id")
MORE = ("eoa_token_index", "eoi_token_id", "video_token_id", "vision_soft_tokens_per_image")
LEFT_OUT = ("audio_tower", "vision_embedder", "embed_vision", "embed_audio")


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip(*OTHER_PARTS, *MORE)
    config = read_text_part(keys, (f"{keys.raw('model_type')}_text",))
    return replace(config, left_out=(*config.left_out, *LEFT_OUT))
