"""Model families. Each file says only what differs from the common decoder; it is named after ``model_type``."""

import importlib
from collections.abc import Callable
from difflib import get_close_matches

from llmc.export.config import DecoderConfig
from llmc.export.families.missing import MISSING
from llmc.export.keys import Keys

# Names of families that an error suggests: how many, and how similar at least.
MOST_NEAR, NEAR = 3, 0.7

# Families that the function ``read`` of the module with their name reads.
_NAMED = """
    apertus bert cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text
    gemma4 gemma4_text glm4 glm4_moe_lite gpt2 gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid hunyuan_v1_dense lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl llada llama ministral3 mistral mistral3
    mistral4 mixtral modernbert mpnet muse_glimmer nemotron_h nomic_bert olmo2 olmo3 olmo_hybrid olmoe phi phi3 qwen2
    qwen2_5_vl qwen3 qwen3_5 qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe_text
    roberta seed_oss smollm3 smolvlm stablelm starcoder2 youtu
"""
# The function that reads each family, imported on use.
FAMILIES = {name: f"llmc.export.families.{name}:read" for name in _NAMED.split()} | {
    "Dream": "llmc.export.families.dream:read",
    "gemma4_unified": "llmc.export.families.gemma4:read",
    "gemma4_unified_text": "llmc.export.families.gemma4_text:read_unified",
    "idefics3": "llmc.export.families.smolvlm:read",
    "muse_glimmer_text": "llmc.export.families.muse_glimmer:read_text",
    "qwen2_5_vl_text": "llmc.export.families.qwen2_5_vl:read_text",
    "qwen3_5_moe": "llmc.export.families.qwen3_5:read",
    "qwen3_vl_moe": "llmc.export.families.qwen3_vl:read",
    "qwen3_vl_text": "llmc.export.families.qwen3_vl:read_text",
    "xlm-roberta": "llmc.export.families.roberta:read",
}


def read_config(keys: Keys) -> DecoderConfig:
    """Read a checkpoint's config with the rules of its family, and refuse unknown keys.

    Raises:
        CheckpointError: the family, a value or a key is not supported.
    """
    name = keys.raw("model_type")
    if isinstance(name, str) and name not in FAMILIES:
        raise keys.error("model_type", name, _suggest(name))
    module, _, function = FAMILIES[keys.choice("model_type", tuple(FAMILIES))].partition(":")
    read: Callable[[Keys], DecoderConfig] = getattr(importlib.import_module(module), function)
    config = read(keys)
    keys.skip("quantization_config", "compression_config")  # how weights are stored, see llmc.export.sources
    keys.finish()
    return config


def _suggest(name: str) -> str:
    """The families that an error expects in the place of an unknown one."""
    if name in MISSING:
        return f"a family that llmc has; this one would take {MISSING[name]}"
    near = get_close_matches(name, FAMILIES, MOST_NEAR, NEAR)
    return f"a family that llmc has; similar names are {', '.join(near)}" if near else f"one of {', '.join(FAMILIES)}"
