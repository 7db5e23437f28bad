"""Translate llama.cpp's architectures of diffusion language models to ``config.json``."""

from collections.abc import Mapping
from typing import Any

from llmc.errors import CheckpointError
from llmc.export.sources.gguf.config import Metadata, read_rope


def _read_masks(data: Metadata, config: Mapping[str, Any], family: str, shift: bool) -> dict[str, Any]:
    """Refuse a file whose tokens do not see all others, or whose logits are at other positions than the family's."""
    for key, expected in ((f"{data.architecture}.attention.causal", False), ("diffusion.shift_logits", shift)):
        if (value := data.values.get(key, expected)) is not expected:
            raise CheckpointError(f"{data.where}: {key} is {value!r:.80}, which is unsupported; expected {expected}")
    data.skip("attention.causal")
    mask = data.values.get("tokenizer.ggml.mask_token_id")
    return {**read_rope(data, config), "model_type": family, "mask_token_id": mask}


READERS = {
    "llada": lambda data, config: _read_masks(data, config, "llada", False),
    "dream": lambda data, config: {**_read_masks(data, config, "Dream", True), "use_sliding_window": False},
}
