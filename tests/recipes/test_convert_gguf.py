"""How checkpoints become GGUF: names and the order of rotated rows. gguf and llama.cpp themselves are absent here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

# float64 sums of the same products in another order.
CLOSE = 1e-12


@pytest.fixture
def convert(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for absent in ("gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, absent, ModuleType(absent))
    return script("convert_gguf")


def test_every_tensor_of_the_small_model_has_a_name_of_its_own(convert, tiny_checkpoint: Path):
    layers = json.loads((tiny_checkpoint / "config.json").read_text())["num_hidden_layers"]
    with safe_open(tiny_checkpoint / "model.safetensors", "np") as file:
        names = [convert.gguf_name(name) for name in file.keys()]  # noqa: SIM118 - it is no mapping
    per_layer = {name.split(".", 2)[2] for name in names if name.startswith("blk.")}
    assert len(set(names)) == len(names) == 2 + layers * len(per_layer)
    assert {"attn_q_norm.weight", "attn_k_norm.weight", "ffn_down.weight"} <= per_layer
    assert {name for name in names if not name.startswith("blk.")} == {"token_embd.weight", "output_norm.weight"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.11.self_attn.q_proj.bias", "blk.11.attn_q.bias"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ],
)
def test_names_follow_llama_cpp(convert, name, expected):
    assert convert.gguf_name(name) == expected


@pytest.mark.parametrize("name", ["model.layers.0.mlp.router.weight", "visual.patch_embed.weight", "lm_head.scales"])
def test_unknown_tensors_are_refused(convert, name):
    with pytest.raises(SystemExit, match=f"tensor {name} is unknown"):
        convert.gguf_name(name)


def rotate(x: np.ndarray, first: np.ndarray, second: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turn the pairs (first[i], second[i]) of a head's components by angles[i]."""
    turned = x.copy()
    turned[first] = x[first] * np.cos(angles) - x[second] * np.sin(angles)
    turned[second] = x[first] * np.sin(angles) + x[second] * np.cos(angles)
    return turned


def scores_of(
    q: np.ndarray, k: np.ndarray, x: np.ndarray, heads: int, pairs: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Attention scores per head between two positions, for projections [heads x D, H] and hidden vectors [2, H]."""
    angles = 10000.0 ** -np.linspace(0, 1, len(pairs[0]), endpoint=False)
    queries, keys = (q @ x[1]).reshape(heads, -1), (k @ x[0]).reshape(heads, -1)
    return np.array([rotate(a, *pairs, 5 * angles) @ rotate(b, *pairs, 2 * angles) for a, b in zip(queries, keys)])  # noqa: B905


def test_interleaved_rows_rotated_in_pairs_equal_the_checkpoint_rotated_in_halves(convert):
    heads, size = 3, 8
    q, k, x = (np.random.default_rng(0).normal(size=shape) for shape in ((24, 16), (24, 16), (2, 16)))
    halves = np.arange(size // 2), np.arange(size // 2) + size // 2
    pairs = np.arange(0, size, 2), np.arange(1, size, 2)
    expected = scores_of(q, k, x, heads, halves)
    found = scores_of(convert.interleave(q, heads), convert.interleave(k, heads), x, heads, pairs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
    assert np.abs(scores_of(q, k, x, heads, pairs) - expected).max() > 1e6 * CLOSE  # left as it is, it is wrong


class Writer:
    """What a GGUF writer is told, by the name of the call."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.told.__setitem__(name, value)


def test_a_vocabulary_that_fills_the_model_is_written_and_any_other_left_out(convert, tiny_checkpoint: Path, tmp_path):
    for path in tiny_checkpoint.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    full, short = Writer(), Writer()
    convert.write_tokenizer(full, tmp_path, size)
    convert.write_tokenizer(short, tmp_path, size + 1)
    assert short.told == {"add_tokenizer_model": "no_vocab"}
    assert (full.told["add_tokenizer_model"], len(full.told["add_token_list"])) == ("gpt2", size)
    assert full.told["add_token_types"][:4] == [convert.CONTROL] * 3 + [convert.NORMAL]
    assert all(merge.count(" ") == 1 for merge in full.told["add_token_merges"])


def test_a_filled_vocabulary_has_a_text_for_each_id_and_encodes_as_before(script, tiny_checkpoint: Path, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("torch")
    path = tmp_path / "tokenizer.json"
    path.write_bytes((tiny_checkpoint / "tokenizer.json").read_bytes())
    make_model = script("make_model")
    make_model.fill_vocabulary(path, 5000)
    before = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    after = tokenizers.Tokenizer.from_file(str(path))
    text = "def add(a, b):\n    return AAAB + QXYZ  # the sum"
    assert after.encode(text).ids == before.encode(text).ids
    assert (after.get_vocab_size(), after.decode([4999]).strip().isalpha()) == (5000, True)
    with pytest.raises(SystemExit, match="has 5000 tokens, the geometry has room for 4999"):
        make_model.fill_vocabulary(path, 4999)
