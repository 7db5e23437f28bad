"""Model families. Each file says only what differs from the common decoder; it is named after ``model_type``."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys
from llmc.export.vision import PatchTowerConfig, TowerConfig

FAMILIES = {
    "Dream": "llmc.export.families.dream:read",
    "cohere": "llmc.export.families.cohere:read",
    "cohere2": "llmc.export.families.cohere2:read",
    "deepseek_v2": "llmc.export.families.deepseek_v2:read",
    "deepseek_v3": "llmc.export.families.deepseek_v3:read",
    "ernie4_5": "llmc.export.families.ernie4_5:read",
    "exaone4": "llmc.export.families.exaone4:read",
    "falcon_h1": "llmc.export.families.falcon_h1:read",
    "gemma": "llmc.export.families.gemma:read",
    "gemma2": "llmc.export.families.gemma2:read",
    "gemma3": "llmc.export.families.gemma3:read",
    "gemma3_text": "llmc.export.families.gemma3_text:read",
    "gemma4": "llmc.export.families.gemma4:read",
    "gemma4_text": "llmc.export.families.gemma4_text:read",
    "gemma4_unified": "llmc.export.families.gemma4_unified:read",
    "gemma4_unified_text": "llmc.export.families.gemma4_unified:read_text",
    "glm4": "llmc.export.families.glm4:read",
    "gpt2": "llmc.export.families.gpt2:read",
    "gpt_neox": "llmc.export.families.gpt_neox:read",
    "gpt_oss": "llmc.export.families.gpt_oss:read",
    "granite": "llmc.export.families.granite:read",
    "granitemoe": "llmc.export.families.granitemoe:read",
    "granitemoehybrid": "llmc.export.families.granitemoehybrid:read",
    "hunyuan_v1_dense": "llmc.export.families.hunyuan_v1_dense:read",
    "idefics3": "llmc.export.families.smolvlm:read",
    "lfm2": "llmc.export.families.lfm2:read",
    "lfm2_moe": "llmc.export.families.lfm2_moe:read",
    "lfm2_vl": "llmc.export.families.lfm2_vl:read",
    "llada": "llmc.export.families.llada:read",
    "llama": "llmc.export.families.llama:read",
    "ministral3": "llmc.export.families.ministral3:read",
    "mistral": "llmc.export.families.mistral:read",
    "mistral3": "llmc.export.families.mistral3:read",
    "mixtral": "llmc.export.families.mixtral:read",
    "nemotron_h": "llmc.export.families.nemotron_h:read",
    "olmo2": "llmc.export.families.olmo2:read",
    "olmo3": "llmc.export.families.olmo3:read",
    "olmoe": "llmc.export.families.olmoe:read",
    "phi": "llmc.export.families.phi:read",
    "phi3": "llmc.export.families.phi3:read",
    "qwen2": "llmc.export.families.qwen2:read",
    "qwen2_5_vl": "llmc.export.families.qwen2_5_vl:read",
    "qwen2_5_vl_text": "llmc.export.families.qwen2_5_vl:read_text",
    "qwen3": "llmc.export.families.qwen3:read",
    "qwen3_5": "llmc.export.families.qwen3_5:read",
    "qwen3_5_moe": "llmc.export.families.qwen3_5_moe:read",
    "qwen3_5_moe_text": "llmc.export.families.qwen3_5_moe_text:read",
    "qwen3_5_text": "llmc.export.families.qwen3_5_text:read",
    "qwen3_moe": "llmc.export.families.qwen3_moe:read",
    "qwen3_vl": "llmc.export.families.qwen3_vl:read",
    "qwen3_vl_text": "llmc.export.families.qwen3_vl:read_text",
    "seed_oss": "llmc.export.families.seed_oss:read",
    "smollm3": "llmc.export.families.smollm3:read",
    "smolvlm": "llmc.export.families.smolvlm:read",
    "stablelm": "llmc.export.families.stablelm:read",
    "starcoder2": "llmc.export.families.starcoder2:read",
}


def read_config(keys: Keys) -> DecoderConfig:
    """Read a checkpoint's config with the rules of its family, and refuse unknown keys.

    Raises:
        CheckpointError: the family, a value or a key is not supported.
    """
    name = keys.choice("model_type", tuple(FAMILIES))
    module, _, function = FAMILIES[name].partition(":")
    read: Callable[[Keys], DecoderConfig] = getattr(importlib.import_module(module), function)
    config = read(keys)
    keys.skip("quantization_config", "compression_config")  # how weights are stored, see llmc.export.sources
    keys.finish()
    return config


# Keys of a vision-language model that do not concern its text.
_VISION = (
    *("boi_token_index", "eoi_token_index", "image_token_id", "image_token_index", "mm_tokens_per_image"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_config"),
    *("scale_factor", "vision_feature_layer", "downsample_factor"),
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm"),
)
# What the text part is called in these.
TEXT_PARTS = (
    ("language_model.model", "model"),
    ("model.language_model", "model"),  # as transformers saves it from 4.52 on
    ("language_model.lm_head", "lm_head"),
    ("model.text_model", "model"),
)


def drop_vision(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its tower, so that its text part alone is read."""
    return {name: value for name, value in values.items() if name != "vision_config"}


def read_text_part(
    keys: Keys,
    families: tuple[str, ...],
    defaults: Mapping[str, Any] | None = None,
    *,
    default_tied: bool = True,
    read_tower: Callable[[Keys, int], TowerConfig | PatchTowerConfig] | None = None,
) -> DecoderConfig:
    """The decoder of a vision-language model: ``text_config``, by the rules of one of ``families``.

    ``defaults`` replace missing keys. ``read_tower`` gets the keys and the decoder's hidden size; without it, or
    without a ``vision_config``, a note tells that the other tensors are left out.
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
    if read_tower is not None and keys.raw("vision_config") is not None:
        tower = read_tower(keys, config.hidden_size)
    else:
        keys.note("only the text part was exported, which sees no images")
    return replace(
        config,
        model_type=str(keys.raw("model_type")),
        tower=tower,
        renamed=(*config.renamed, *TEXT_PARTS),
        left_out=(*config.left_out, "vision_tower", "multi_modal_projector", "visual", "vision_model", "connector"),
    )
