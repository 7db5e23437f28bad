"""Dream: Qwen2 as a diffusion language model, whose logits for a token are at the position before it."""

from llmc.export.config import DecoderConfig
from llmc.export.families import qwen2
from llmc.export.families.diffusion import fill_masks
from llmc.export.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    """Every key but ``mask_token_id`` is Qwen2's."""
    return fill_masks(keys, qwen2.read(keys), shift=1)
