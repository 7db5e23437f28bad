"""The common part of families whose text part belongs to a model that sees, or hears."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig, TowerShape
from llmc.export.families import read_config
from llmc.export.keys import Keys

# Keys of a vision-language model that do not concern its text.
_VISION = (
    *("boi_token_index", "eoi_token_index", "image_token_id", "image_token_index", "mm_tokens_per_image"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_config"),
    *("scale_factor", "vision_feature_layer", "downsample_factor"),
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm"),
)
# Keys of a tower's config, and what a model without it does not take.
_TOWERS = {"vision_config": "sees no images", "audio_config": "hears no audio"}
# Names of their text part.
TEXT_PARTS = (
    ("language_model.model", "model"),
    ("model.language_model", "model"),  # as transformers saves it from 4.52 on
    ("language_model.lm_head", "lm_head"),
    ("model.text_model", "model"),
)


LEFT_OUT = "vision_tower", "audio_tower", "multi_modal_projector", "visual", "vision_model", "connector"


def keep_text_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its towers, so that only its text part is read."""
    return {name: value for name, value in values.items() if name not in _TOWERS}


def read_text_part(
    keys: Keys,
    families: tuple[str, ...],
    defaults: Mapping[str, Any] | None = None,
    *,
    default_tied: bool = True,
    read_tower: Callable[[Keys, int], TowerShape] | None = None,
    part: str = "vision_config",
) -> DecoderConfig:
    """The decoder of a model that sees or hears: ``text_config``, by the rules of one of ``families``.

    ``defaults`` replace missing keys. ``read_tower`` gets the keys and the decoder's hidden size; without it, or
    without the tower's config ``part``, a note tells that the other tensors are left out.
    """
    outer = {name: keys.raw(name) for name in ("bos_token_id", "eos_token_id") if keys.raw(name) is not None}
    keys.inside("text_config")
    stated = keys.raw("text_config")
    tied = keys.flag("tie_word_embeddings", default_tied)  # that of the text part is not read
    values = {**(defaults or {}), **outer, **stated, "tie_word_embeddings": tied}
    inner = Keys(values, f"{keys.where}: text_config")
    inner.choice("model_type", families)
    config = read_config(inner)
    keys.skip(*_VISION)
    keys.notes += inner.notes
    tower = None
    if read_tower is not None and keys.raw(part) is not None:
        tower = read_tower(keys, config.hidden_size)
    else:
        keys.note(f"only the text part was exported, which {_TOWERS[part]}")
    return replace(
        config,
        model_type=str(keys.raw("model_type")),
        tower=tower,
        renamed=(*config.renamed, *TEXT_PARTS),
        left_out=(*config.left_out, *LEFT_OUT),
    )
