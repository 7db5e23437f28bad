"""The codes, scales and minima of a GGUF file's tensors are those of the decode graph."""

import json
from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
import pytest
from doubles.ggufs import dequantize, load, write_gguf
from doubles.lowerings import difference
from doubles.tiny import SMALL_MODEL
from safetensors.numpy import save_file

from llmc.export import export
from llmc.export.sources.gguf.tensors import parameter
from llmc.optimize.build import build
from llmc.optimize.lower.context import quant_configs
from llmc.optimize.plan.memory import bundle_bytes
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities

# Largest difference of a weight whose offset is rounded to 8 bits, in steps of these: the best scale clips a few beyond
# half a step. The offset of another block is off by up to 250 steps.
OFFSET_STEPS = 1.0
# Norms, rotary tables and padding to pages, which plans leave out: of the weights of a model of one layer.
LEFT_OUT = 0.02
# Activations in 8 bits alone cost less; another scale or minimum costs nats.
MOST_KL = 0.01
# Largest difference of logits from those of dequantized weights, of the largest: offsets are rounded.
LOGIT_TOLERANCE = 0.01


def weights(node) -> np.ndarray:
    """What a MatMulNBits multiplies with, float32 [N, K]."""
    bits, block, columns = (node.attributes[name].as_int() for name in ("bits", "block_size", "K"))
    data = read(node.inputs[1], np.uint8)
    codes = (data[..., None] >> np.arange(0, 8, bits, np.uint8) & ((1 << bits) - 1)).reshape(len(data), -1)
    levels = codes[:, :columns].astype(np.float32) - (1 << (bits - 1))
    return levels * np.repeat(read(node.inputs[2], np.float32), block, axis=1)[:, :columns]


def read(value, dtype) -> np.ndarray:
    """A stored matrix, a row for each of the first axis."""
    stored = value.const_value
    data = np.memmap(stored.path, np.uint8, "r", stored.offset, (stored.length,)).view(dtype)
    return data.reshape(stored.shape.numpy()[0], -1)


def as_source(lowered):
    """The lowering with the storage that a build has by default."""
    recipe = resolve(Request(phases="shared"), capabilities("cpu"), 128, "x", coded=True)[0]
    object.__setattr__(lowered.context, "quant", quant_configs(recipe, lowered.geometry)["shared"])
    return lowered.finish()


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    """The small model's first layer."""
    folder = tmp_path_factory.mktemp("layer")
    config = json.loads((SMALL_MODEL / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "layer_types"}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = {
        name: array for name, array in load(SMALL_MODEL).items() if ".layers." not in name or ".layers.0." in name
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def kinds_of(q_k_v: str, gate_and_up: str, down: str, others: str) -> dict[str, str]:
    parts = {f"attn_{part}": q_k_v for part in "qkv"} | {"ffn_gate": gate_and_up, "ffn_up": gate_and_up}
    named = {f"blk.0.{part}.weight": kind for part, kind in (parts | {"ffn_down": down}).items()}
    return defaultdict(lambda: others, named)


@pytest.mark.parametrize(
    ("kinds", "has_minima"),
    [
        (kinds_of("Q4_0", "Q3_K", "Q6_K", "Q8_0"), False),
        (kinds_of("Q2_K", "Q5_K", "Q2_K", "Q5_K"), True),
        (kinds_of("TQ1_0", "TQ2_0", "NVFP4", "Q1_0"), False),
    ],
    ids=["scales", "minima", "two bits"],
)
def test_matrices_are_the_files_to_the_last_bit(kinds, has_minima, one_layer, lowering, tmp_path):
    """All linears and the tied head, which share names with none but themselves; minima are rounded to 8 bits."""
    path = write_gguf(one_layer, tmp_path / "tiny.gguf", kinds)
    lowered = as_source(lowering(export(path, tmp_path / "export").output))
    entries = gguf.GGUFReader(path).tensors
    stored = {parameter(it.name, "x"): dequantize(it.data, it.tensor_type.name) for it in entries}
    products = {node.inputs[1].name: node for node in lowered.nodes("MatMulNBits")}
    minima = {name.removesuffix(".offsets"): products.pop(name) for name in list(products) if ".offsets" in name}
    for name, node in products.items():
        expected = np.concatenate([stored[part] for part in name.rpartition(".")[0].split("+")])
        if not minima:
            np.testing.assert_array_equal(weights(node), expected)
        elif name in minima:
            block, step = node.attributes["block_size"].as_int(), np.abs(read(minima[name].inputs[2], np.float32)).max()
            found = weights(node) + np.repeat(weights(minima[name]), block, axis=1)
            assert np.abs(found - expected).max() <= step * OFFSET_STEPS
    assert len(minima) == (len(products) if has_minima else 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_bundle_with_a_coded_table_takes_the_planned_bytes(tied, one_layer, tmp_path):
    """Codes of 4 bits with minima, read by rows in both graphs, and by the head if it is the same table."""
    (folder := tmp_path / "checkpoint").mkdir()
    config, tensors = json.loads((one_layer / "config.json").read_text()), load(one_layer)
    tensors |= {} if tied else {"lm_head.weight": tensors["model.embed_tokens.weight"][::-1].copy()}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    save_file(tensors, folder / "model.safetensors")
    path = write_gguf(folder, tmp_path / "tiny.gguf", defaultdict(lambda: "Q8_0", {"token_embd.weight": "Q4_K"}))
    built = build(BuildRequest(export(path, tmp_path / "export").output, tmp_path / "bundle", max_context=64)).manifest
    vocab, hidden = built.geometry.vocab_size, built.geometry.hidden_size
    planned = bundle_bytes(built.geometry, built.recipe, built.limits, 0) + 4 * hidden**2  # the rotation of prompts
    assert (1 - LEFT_OUT) * built.files["weights.bin"].size < planned <= built.files["weights.bin"].size
    assert built.memory["embedding"].fixed == vocab * (hidden // 2 + hidden // 32 * (4 + 4))
    assert built.quality is not None and built.quality.phases["decode"].mean_kl < MOST_KL


def test_a_model_of_2_bits_is_one_graph_of_them(one_layer, tmp_path):
    """Weights of prompts in 8 bits would take four times as much. The head, which is tied, shares the table."""
    path = write_gguf(one_layer, tmp_path / "tiny.gguf", "Q1_0")
    built = build(BuildRequest(export(path, tmp_path / "export").output, tmp_path / "bundle", max_context=64)).manifest
    assert (built.recipe.precision, built.recipe.phases, built.recipe.activations) == ("source", "shared", "none")
    weights, written = sum(it.size for it in built.geometry.linears), built.files["weights.bin"].size
    assert weights * 2.25 <= 8 * written < weights * 2.5  # a float32 scale for 128 codes, and what plans leave out
    assert built.quality is not None and built.quality.phases["decode"].mean_kl < MOST_KL


def test_one_sum_of_blocks_serves_all_that_read_the_same(one_layer, lowering, decoder, ids, tmp_path):
    path = write_gguf(one_layer, tmp_path / "tiny.gguf", defaultdict(lambda: "Q4_K", {"token_embd.weight": "Q6_K"}))
    folder = export(path, tmp_path / "export").output
    plain, lowered = lowering(folder).finish(), as_source(lowering(folder))
    sums = lowered.nodes("ReduceSum")
    assert len(sums) == 4  # q, k and v, then o, gate and up, down
    lowered.exact()
    expected = decoder(plain.write(), plain.geometry)(ids)
    allowed = LOGIT_TOLERANCE * np.abs(expected).max()
    assert difference(decoder(lowered.write(), lowered.geometry)(ids), expected) <= allowed
    for node in sums:
        node.op_type = "ReduceMean"
    assert difference(decoder(lowered.write(), lowered.geometry)(ids), expected) > allowed


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_experts_are_the_files_to_the_last_bit_but_for_minima(kind, write_random, lowering, tmp_path):
    """Rows of gate and up in turn. Minima have no place: such experts are rounded anew, with zero points."""
    changes = {"dtype": "float32", "mlp_only_layers": [], "hidden_size": 256, "moe_intermediate_size": 256}
    checkpoint = write_random("qwen3_moe-first-layer-dense-bf16", **changes, num_hidden_layers=1)
    kinds = defaultdict(lambda: "Q8_0", {f"blk.0.ffn_{part}_exps.weight": kind for part in ("gate", "up", "down")})
    path = write_gguf(checkpoint, tmp_path / "model.gguf", kinds)
    stored = {it.name: gguf.dequantize(it.data, it.tensor_type) for it in gguf.GGUFReader(path).tensors}
    [node] = as_source(lowering(export(path, tmp_path / "gguf").output)).nodes("QMoE")
    gate, up, down = (stored[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    bits, has_zeros = node.attributes["expert_weight_bits"].as_int(), len(node.inputs) > 11
    assert (bits, has_zeros) == (8 if kind == "Q8_0" else 4, kind == "Q4_K")
    for at, expected in ((2, np.stack([gate, up], 2).reshape(8, 512, 256)), (5, down)):
        if not has_zeros:
            data = read(node.inputs[at], np.uint8)
            codes = np.stack([data & 15, data >> 4], axis=-1) if bits == 4 else data
            levels = codes.reshape(expected.shape).astype(np.float32) - (1 << (bits - 1))
            scales = read(node.inputs[at + 1], np.float32).reshape(*expected.shape[:2], -1)
            np.testing.assert_array_equal(levels * np.repeat(scales, 32, 2), expected)
