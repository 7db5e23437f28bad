"""The common part of diffusion language models: every token sees all others, and masks become tokens."""

from dataclasses import replace

from llmc.bundle import Generation
from llmc.bundle.model.diffusion import Diffusion
from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.reading import token_ids


def fill_masks(keys: Keys, config: DecoderConfig, shift: int) -> DecoderConfig:
    """A decoder whose tokens see all others, and whose logits stand ``shift`` positions before their tokens."""
    masks = token_ids(keys, "mask_token_id", config.vocab_size)
    if len(masks) != 1:
        raise keys.error("mask_token_id", keys.raw("mask_token_id"), "one token id")
    if any(item.window for item in config.geometry.attentions):
        raise keys.error("use_sliding_window", True, "false")
    config = config.change_attentions(lambda _, attention: replace(attention, causal=False))
    return replace(config, diffusion=Diffusion(masks[0], shift))


def keep_possible(config: DecoderConfig, generation: Generation) -> Generation:
    """Defaults of sampling without what changes logits, if the model fills masks, though its checkpoint may ask."""
    if config.diffusion is None:
        return generation
    kept = generation.eos_token_ids, generation.bos_token_id, generation.do_sample, generation.temperature
    return Generation(*kept, None, None, None)
