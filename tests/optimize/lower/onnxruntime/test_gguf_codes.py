"""The codes of a GGUF file's Q4_0 and Q8_0 tensors are those of the decode graph."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from doubles.ggufs import load, write_gguf
from doubles.invented import TINY
from safetensors.numpy import save_file

from llmc.export import export
from llmc.optimize.lower.context import quant_configs
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities


def weights(node) -> np.ndarray:
    """What a MatMulNBits multiplies with, float32 [N, K]."""
    bits, block, columns = (node.attributes[name].as_int() for name in ("bits", "block_size", "K"))
    packed, scales = (value.const_value for value in node.inputs[1:3])
    data = np.fromfile(packed.path, np.uint8, packed.length, offset=packed.offset).reshape(packed.shape.numpy()[0], -1)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1) if bits == 4 else data
    levels = codes[:, :columns].astype(np.float32) - (1 << (bits - 1))
    scales = np.fromfile(scales.path, np.float32, scales.length // 4, offset=scales.offset)
    return levels * np.repeat(scales.reshape(len(data), -1), block, axis=1)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    """The small model's first layer."""
    folder = tmp_path_factory.mktemp("layer")
    config = json.loads((TINY / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "layer_types"}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = {name: array for name, array in load(TINY).items() if ".layers." not in name or ".layers.0." in name}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_matrices_are_the_files_to_the_last_bit(kind, one_layer, lowering, tmp_path):
    """All linears and the tied head, which share names with none but themselves."""
    path = write_gguf(one_layer, tmp_path / "tiny.gguf", kind)
    lowered = lowering(export(path, tmp_path / "export").output)
    recipe = resolve(Request(phases="shared"), capabilities("cpu"), 128, "x", coded=True)[0]
    object.__setattr__(lowered.context, "quant", quant_configs(recipe, lowered.geometry)["shared"])
    lowered = lowered.finish()
    stored = {item.name: gguf.dequantize(item.data, item.tensor_type) for item in gguf.GGUFReader(path).tensors}
    layer = {"qkv_proj": ("attn_q", "attn_k", "attn_v"), "o_proj": ("attn_output",), "down_proj": ("ffn_down",)}
    layer |= {"gate_proj": ("ffn_gate",), "up_proj": ("ffn_up",), "gate_up_proj": ("ffn_gate", "ffn_up")}
    nodes = {node.name: node for node in lowered.nodes("MatMulNBits")}
    assert len(nodes) == len(lowered.nodes("MatMulNBits")) > 4
    for name, node in nodes.items():
        module = next((part for part in layer if f".{part}" in name), None)
        parts = [f"blk.{name.split('.')[2]}.{part}" for part in layer[module]] if module else ["token_embd"]
        np.testing.assert_array_equal(weights(node), np.concatenate([stored[f"{part}.weight"] for part in parts]))
