"""SmolVLM, SmolVLM2 and Idefics3: a Llama as the text part of a vision-language model; only that part is exported."""

from llmc.export.config import DecoderConfig
from llmc.export.families import read_text_part
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """Published configs repeat the text part's numbers, and say how training saved memory."""
    keys.skip("vocab_size", "_pad_token_id", "use_reentrant_checkpointing")
    return read_text_part(keys, ("llama",), default_tied=False)
