"""Youtu-LLM: a dense decoder with the attention of DeepSeek-V3."""

from llmc.export.config import DecoderConfig
from llmc.export.families.deepseek_v2 import read_latent
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """The head is tied by default."""
    keys.skip("embedding_initializer_range")
    keys.fill(q_lora_rank=1536, tie_word_embeddings=True)
    return read_latent(keys)
