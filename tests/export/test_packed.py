"""Tensors that hold several parameters, of sizes that the config does not give them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint

LAYER = "model.layers.1"


def changed(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def without_a_row(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name][1:].copy()

    return change


@pytest.mark.parametrize(
    ("case", "own", "shown"),
    [
        ("phi3-packed-window-fp16", f"{LAYER}.mlp.gate_up_proj.weight", r"gate_up_proj\.weight has shape \[191, 64\]"),
        ("gpt2-scale-by-layer", "transformer.h.1.attn.c_attn.weight", r"c_attn\.weight has shape \[63, 192\]"),
        ("gpt2-scale-by-layer", "transformer.h.1.mlp.c_fc.weight", r"up_proj\.weight has shape \[96, 63\]"),
        ("gpt_neox-two-norms", "gpt_neox.layers.1.attention.query_key_value.bias", r"bias has shape \[191\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(exported, tmp_path, case, own, shown):
    folder = changed(exported(case).checkpoint, tmp_path, without_a_row(own))
    with pytest.raises(CheckpointError, match=shown):
        read_checkpoint(folder)


def test_two_names_of_one_parameter_are_refused(exported, tmp_path):
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["transformer.wte.weight"]

    folder = changed(exported("gpt2-scale-by-layer").checkpoint, tmp_path, change)
    with pytest.raises(CheckpointError, match=r"is stored twice, the second time as model\.embed_tokens\.weight"):
        read_checkpoint(folder)


def test_buffers_that_older_checkpoints_store_are_left_out(exported, tmp_path):
    """As published GPT-2 has them: names without a prefix, and the mask of attention."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)

    source = exported("gpt2-scale-by-layer").checkpoint
    folder = changed(source, tmp_path, change)
    assert read_checkpoint(folder).tensors.keys() == read_checkpoint(source).tensors.keys()
