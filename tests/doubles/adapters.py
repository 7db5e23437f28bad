"""Random LoRA adapters in PEFT's folders, without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from llmc.bundle import Geometry


def draw_factors(geometry: Geometry, rank: int = 8, seed: int = 1, deviation: float = 0.05) -> dict[str, Any]:
    """Tensors, by PEFT's names, that change every linear that can be changed beside a loaded model."""
    draw, found = np.random.default_rng(seed).standard_normal, {}
    for it in geometry.linears:
        if it.is_open:
            found[f"base_model.model.{it.name}.lora_A.weight"] = draw((rank, it.inputs), np.float32) * deviation
            found[f"base_model.model.{it.name}.lora_B.weight"] = draw((it.outputs, rank), np.float32) * deviation
    return found


def write_adapter(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
