"""Experts in MXFP4, as gpt-oss publishes them, written into a random checkpoint; and the floats that they stand for."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# As published.
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def pack(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [E, N, K / 32, 16] and scales uint8 [E, N, K / 32] of floats [E, K, N], rounded to nearest."""
    values = stack.float().mT.contiguous().unflatten(-1, (-1, 32))
    exponents = (values.abs().amax(-1) / 6).clamp_min(2.0**-100).log2().ceil()
    scaled = values / exponents.exp2().unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), (VALUES[1:] + VALUES[:-1]) / 2) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a gpt_oss checkpoint of floats; its tensors are returned as transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    floats = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = pack(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return floats
