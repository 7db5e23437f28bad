"""A checkpoint folder: every tensor is used once, and whatever is broken is named."""

import json
import shutil

import numpy as np
import pytest

from llmc.errors import CheckpointError
from llmc.export.sources.checkpoint import read_checkpoint


def refuses(checkpoint, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(checkpoint.folder)
    for word in words:
        assert word in str(caught.value)


def test_a_valid_checkpoint_is_read(checkpoint):
    found = read_checkpoint(checkpoint.folder)
    assert found.tensors.keys() == checkpoint.tensors.keys()
    assert (found.source.name, found.source.dtype, found.source.parameters) == ("checkpoint", "float32", 824)
    assert found.generation.eos_token_ids == (2,) and found.generation.bos_token_id == 1
    assert found.notes == ()
    data = (checkpoint.folder / "model.safetensors").read_bytes()
    for name, tensor in found.tensors.items():
        assert data[tensor.offset : tensor.offset + tensor.length] == checkpoint.tensors[name].tobytes()


def test_shards_are_read_through_their_index(checkpoint):
    checkpoint.split()
    found = read_checkpoint(checkpoint.folder)
    assert found.tensors.keys() == checkpoint.tensors.keys()
    assert {tensor.file for tensor in found.tensors.values()} == {path.name for path in found.files}
    assert len(found.files) == 2


def gone(name: str):
    return lambda folder: (folder / name).unlink()


def holding(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def renamed(name: str, to: str):
    return lambda folder: (folder / name).rename(folder / to)


WEIGHTS = "model.safetensors"
FILES = {
    "no config": (gone("config.json"), ["no config.json", "expected a Hugging Face checkpoint folder"]),
    "no tokenizer": (gone("tokenizer.json"), ["no tokenizer.json", "AutoTokenizer", "save_pretrained"]),
    "no weights": (gone(WEIGHTS), ["neither model.safetensors nor model.safetensors.index.json"]),
    "pickled weights": (
        renamed(WEIGHTS, "pytorch_model.bin"),
        ["pytorch_model.bin", "can run code when opened", "AutoModelForCausalLM", "save_pretrained"],
    ),
    "a corrupt tokenizer": (holding("tokenizer.json", b"{"), ["tokenizer.json cannot be read as JSON"]),
    "an export": (holding("export.json", b"{}"), ["is an export already", "llmc build"]),
    "no safetensors file": (
        holding(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        ["truncated or not safetensors", "43 bytes"],
    ),
    "a truncated config": (holding("config.json", b'{"a": "b"'), ["config.json cannot be read as JSON", "line 1"]),
    "a list for a config": (holding("config.json", b"[1, 2]"), ["holds a JSON list", "expected an object"]),
    "null for generation defaults": (holding("generation_config.json", b"null"), ["holds a JSON null"]),
    "a config that is no UTF-8": (holding("config.json", b"\xff"), ["config.json cannot be read as JSON"]),
    "an adapter beside it": (
        holding("adapter_config.json", b"{}"),
        ["adapter_config.json belongs to an adapter, which llmc would leave out; export its base model with it: llmc"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_is_no_whole_checkpoint_is_refused(checkpoint, name):
    spoil, words = FILES[name]
    spoil(checkpoint.folder)
    refuses(checkpoint, *words)


def test_a_missing_folder_is_named(checkpoint):
    checkpoint.folder = checkpoint.folder / "nowhere"
    refuses(checkpoint, "nowhere is not a folder", "local Hugging Face checkpoint folder")


def test_an_adapter_alone_is_no_model(checkpoint):
    (checkpoint.folder / "adapter_config.json").write_text("{}")
    (checkpoint.folder / "config.json").unlink()
    (checkpoint.folder / WEIGHTS).rename(checkpoint.folder / "adapter_model.safetensors")
    refuses(checkpoint, "is an adapter (adapter_config.json), not a whole model; export its base model with it")


def test_a_missing_shard_is_named(checkpoint):
    checkpoint.split()
    (checkpoint.folder / "model-00002-of-00002.safetensors").unlink()
    refuses(checkpoint, "shard model-00002-of-00002.safetensors is missing", "index.json names it")


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(checkpoint, keep):
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuses(checkpoint, "model.safetensors is truncated", "download it again")


def test_bytes_after_the_last_tensor_are_noticed(checkpoint):
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    refuses(checkpoint, "model.safetensors is corrupt", "its header says")


def write_header(checkpoint, header: bytes, data: bytes = b"") -> None:
    (checkpoint.folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", ["corrupt safetensors header"]),
        (b"[]", ["corrupt safetensors header", "not a JSON object"]),
        (b'{"a": 1}', ["entry for a is corrupt"]),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', ["entry for a is corrupt"]),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', ["a takes 4 bytes", "F32 [2] needs 8"]),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', ["overlap or leave gaps"]),
        (b'{"a": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}}', ["a has dtype I16", "F32, F16, BF16"]),
    ],
)
def test_a_corrupt_header_is_named(checkpoint, header, words):
    write_header(checkpoint, header, b"\0" * 4)
    refuses(checkpoint, *words)


def test_an_unsupported_dtype_is_named(checkpoint):
    checkpoint.write_weights(dtypes={"model.norm.weight": "I32"})
    refuses(checkpoint, "model.norm.weight has dtype I32", "does not say how it is quantized")


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_a_corrupt_index_is_named(checkpoint, text):
    checkpoint.split()
    (checkpoint.folder / "model.safetensors.index.json").write_text(text)
    refuses(checkpoint, "model.safetensors.index.json is corrupt", "no weight_map")


@pytest.mark.threat("checkpoint-links")
@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3, "config.json"])
def test_an_index_that_leads_out_of_the_folder_is_refused(checkpoint, file):
    checkpoint.split()
    checkpoint.write_index({"model.norm.weight": file})
    refuses(checkpoint, "model.norm.weight is listed in", "a file name in the same folder")


def test_an_index_that_disagrees_with_its_shards_is_refused(checkpoint):
    checkpoint.split()
    index = json.loads((checkpoint.folder / "model.safetensors.index.json").read_text())["weight_map"]
    checkpoint.write_index({**index, "lm_head.weight": "model-00001-of-00002.safetensors"})
    refuses(checkpoint, "says that lm_head.weight is in model-00001-of-00002.safetensors, where it is not")
    checkpoint.write_index({name: file for name, file in index.items() if name != "lm_head.weight"})
    refuses(checkpoint, "holds lm_head.weight", "does not name")


UP, BIAS = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
TENSORS = {
    "missing": ({UP: None}, [f"tensor {UP} is missing", "the 12 tensors of a llama decoder"]),
    "no head": ({"lm_head.weight": None}, ["tensor lm_head.weight is missing", "tie_word_embeddings=false"]),
    "unused": ({BIAS: np.zeros(8, np.float32)}, [f"tensor {BIAS} [8] is unused", "changes the result"]),
    "another shape": (
        {"model.norm.weight": np.zeros(9, np.float32)},
        ["model.norm.weight has shape [9]", "config.json asks for [8]"],
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_the_config_are_named(checkpoint, name):
    changes, words = TENSORS[name]
    tensors = {**checkpoint.tensors, **changes}
    checkpoint.tensors = {own: array for own, array in tensors.items() if array is not None}
    checkpoint.write_weights()
    refuses(checkpoint, *words)


def test_stored_rotary_frequencies_are_ignored(checkpoint):
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    checkpoint.write_weights()
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in read_checkpoint(checkpoint.folder).tensors


def test_a_tied_head_may_be_stored_only_as_the_embedding_itself(checkpoint):
    checkpoint.set_config(tie_word_embeddings=True)
    refuses(checkpoint, "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings=false")
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.write_weights()
    assert "lm_head.weight" not in read_checkpoint(checkpoint.folder).tensors


def write_generation(checkpoint, **values) -> None:
    (checkpoint.folder / "generation_config.json").write_text(json.dumps(values))


def test_generation_defaults_are_taken_over(checkpoint):
    values = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}
    write_generation(checkpoint, eos_token_id=[3, 4], bos_token_id=5, **values)
    generation = read_checkpoint(checkpoint.folder).generation
    assert (generation.eos_token_ids, generation.bos_token_id) == ((3, 4), 5)
    assert {name: getattr(generation, name) for name in values} == values


def test_config_fills_in_what_generation_config_does_not_say(checkpoint):
    write_generation(checkpoint, temperature=0.5)
    generation = read_checkpoint(checkpoint.folder).generation
    assert (generation.eos_token_ids, generation.bos_token_id, generation.top_p) == ((2,), 1, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"eos_token_id": -1}, ["eos_token_id=-1", "null, a token id, or a list of at most 1024"]),
        ({"temperature": -1}, ["temperature=-1", "a number from 0"]),
        ({"top_p": 0}, ["top_p=0", "from 1e-09 to 1"]),
        ({"top_k": 1.5}, ["top_k=1.5", "whole number"]),
        ({"do_sample": "yes"}, ["do_sample='yes'", "true or false"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0", "a number from 0.01 to 100"]),
        ({"typical_p": "high"}, ["typical_p='high'", "a number from"]),
        ({"suppress_tokens": [-1]}, ["suppress_tokens=[-1]", "a list of at most 262144 token ids"]),
        ({"bad_words_ids": [3]}, ["bad_words_ids=[3]", "a list of lists of token ids"]),
        ({"bad_words_ids": [[]]}, ["bad_words_ids=[[]]", "a list of lists of token ids"]),
    ],
)
def test_a_wrong_generation_default_is_named(checkpoint, values, words):
    write_generation(checkpoint, **values)
    refuses(checkpoint, "generation_config.json: ", *words)


def test_the_fingerprint_follows_config_headers_and_sizes(checkpoint):
    first = read_checkpoint(checkpoint.folder).source.fingerprint
    assert read_checkpoint(checkpoint.folder).source.fingerprint == first
    checkpoint.set_config(rope_theta=5000.0)
    second = read_checkpoint(checkpoint.folder).source.fingerprint
    checkpoint.split()
    assert len({first, second, read_checkpoint(checkpoint.folder).source.fingerprint}) == 3


def test_the_fingerprint_sees_other_weights_of_the_same_shapes(checkpoint):
    first = read_checkpoint(checkpoint.folder)
    tensor = next(iter(first.tensors.values()))
    path = checkpoint.folder / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + tensor.length - 1] ^= 1
    path.write_bytes(data)
    assert read_checkpoint(checkpoint.folder).source.fingerprint != first.source.fingerprint


def test_a_model_that_looks_at_later_tokens_generates_no_text(exported, tmp_path):
    folder = shutil.copytree(exported("gemma3-two-ropes").checkpoint, tmp_path / "both-ways")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": True}))
    with pytest.raises(CheckpointError, match=r"attends to later tokens, .* without modules\.json"):
        read_checkpoint(folder)
