"""Model families. Each file says only what differs from the common decoder; it is named after ``model_type``."""

import importlib
from collections.abc import Callable

from llmc.export.config import DecoderConfig
from llmc.export.keys import Keys

FAMILIES = {
    "granite": "llmc.export.families.granite:read",
    "llama": "llmc.export.families.llama:read",
    "mistral": "llmc.export.families.mistral:read",
    "phi3": "llmc.export.families.phi3:read",
    "qwen2": "llmc.export.families.qwen2:read",
    "qwen3": "llmc.export.families.qwen3:read",
    "seed_oss": "llmc.export.families.seed_oss:read",
    "smollm3": "llmc.export.families.smollm3:read",
}


def read_config(keys: Keys) -> DecoderConfig:
    """Read a checkpoint's config with the rules of its family, and refuse what is left over.

    Raises:
        CheckpointError: the family, a value or a key is not supported.
    """
    name = keys.choice("model_type", tuple(FAMILIES))
    module, _, function = FAMILIES[name].partition(":")
    read: Callable[[Keys], DecoderConfig] = getattr(importlib.import_module(module), function)
    config = read(keys)
    keys.finish()
    return config
