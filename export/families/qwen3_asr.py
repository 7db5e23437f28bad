"""Qwen3-ASR: a Qwen3 that writes down what it hears; audio tokens of its prompt are rows of a Whisper-like encoder."""

from llmc.export.audio.reading import read_tower
from llmc.export.config import DecoderConfig
from llmc.export.families.vision_language import read_text_part
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """Timestamps are of the forced aligner, another model of this family, whose head is not the decoder's."""
    keys.skip("audio_token_id", "timestamp_token_id", "token_classification_bias")
    return read_text_part(keys, ("qwen3",), read_tower=read_tower, part="audio_config")
