"""Qwen3.5 as published, dense or with experts: a text part of a model that sees images as Qwen3-VL does."""

from llmc.export.config import DecoderConfig
from llmc.export.families.qwen2_5_vl import place_by_axes
from llmc.export.families.qwen3_vl import read_tower
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys
from llmc.export.vision.reading import QWEN_KEYS


def read(keys: Keys) -> DecoderConfig:
    """``text_config`` is read by the rules of the text part."""
    keys.skip(*QWEN_KEYS)
    config = read_text_part(keys, (f"{keys.raw('model_type')}_text",), default_tied=False, read_tower=read_tower)
    return place_by_axes(keys, config, (11, 11, 10), interleaved=True)
