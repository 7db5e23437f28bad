"""Tensors that hold several parameters, of sizes that the config does not give them."""

import pytest
from safetensors.numpy import load_file, save_file

from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint

LAYER = "model.layers.1"


def test_a_packed_tensor_of_another_shape_is_named(exported, tmp_path):
    source = exported("phi3-packed-window-fp16").checkpoint
    tensors = load_file(source / "model.safetensors")
    tensors[f"{LAYER}.mlp.gate_up_proj.weight"] = tensors[f"{LAYER}.mlp.gate_up_proj.weight"][1:].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.mlp\.gate_up_proj\.weight has shape \[159, 64\]"):
        read_checkpoint(tmp_path)
