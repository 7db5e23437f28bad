"""Checkpoints of people who mean harm: each is refused in a sentence, and nothing of the export is left."""

import json
import os
import re
from typing import Any

import numpy as np
import pytest

from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.keys import RANGES, Keys
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.safetensors import LONGEST_NAME

COPIED = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


@pytest.mark.threat("checkpoint-links")
@pytest.mark.parametrize("name", [*COPIED, "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_links_out_of_the_checkpoint_is_refused(checkpoint, name):
    """It may be there so that somebody's key is copied into what he publishes."""
    if name == "model.safetensors.index.json":
        checkpoint.split()
    content = (checkpoint.folder / name).read_bytes() if (checkpoint.folder / name).exists() else b"PRIVATE KEY"
    (checkpoint.folder / name).unlink(missing_ok=True)
    outside = checkpoint.folder.parent / "outside"
    outside.write_bytes(content)
    (checkpoint.folder / name).symlink_to(outside)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)} is (a link to .*outside, outside its folder|corrupt)"
    ):
        export(checkpoint.folder, checkpoint.folder.parent / "export")
    assert {path.name for path in checkpoint.folder.parent.iterdir()} == {"checkpoint", "outside"}


@pytest.mark.threat("checkpoint-links")
@pytest.mark.parametrize("name", [*COPIED, "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(checkpoint, name):
    (checkpoint.folder / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint.folder / name)
    with pytest.raises(CheckpointError, match=r"is not a regular file|neither model.safetensors"):
        export(checkpoint.folder, checkpoint.folder.parent / "export")
    assert os.listdir(checkpoint.folder.parent) == ["checkpoint"]


ABSURD = {"deep": '{"a":' * 100_000, "closed": "[" * 500 + "]" * 500, "digits": '{"vocab_size": ' + "9" * 4000 + "}"}


@pytest.mark.threat("checkpoint-json")
@pytest.mark.parametrize("content", ABSURD.values(), ids=ABSURD)
@pytest.mark.parametrize("name", [*COPIED[:-1], "generation_config.json", "header", "index"])
def test_json_beyond_any_bound_is_refused(checkpoint, name, content):
    if name == "header":
        text = content.encode()
        (checkpoint.folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    elif name == "index":
        checkpoint.split()
        (checkpoint.folder / "model.safetensors.index.json").write_text(content)
    else:
        (checkpoint.folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"levels deep|integer of 4000 digits|index.json is corrupt"):
        read_checkpoint(checkpoint.folder)


@pytest.mark.threat("terminal-escapes")
def test_a_name_with_an_escape_sequence_is_shown_as_text(checkpoint):
    checkpoint.tensors["\x1b[2J\x1b]0;owned\x07\u202emodel"] = np.zeros(1, np.float32)
    checkpoint.write_weights()
    with pytest.raises(
        CheckpointError, match=r"'\\x1b\[2J\\x1b\]0;owned\\x07\\u202emodel'... is a tensor's name"
    ) as caught:
        read_checkpoint(checkpoint.folder)
    assert str(caught.value).isprintable()


FORGED = "a\nllmc: error: forged" + "z" * 5_000
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {FORGED: {"weights": {FORGED: 1}}}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors.index.json", json.dumps({"weight_map": {FORGED: f"../{FORGED}"}})),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": f"{FORGED[:90]}.safetensors"}})),
        ("config.json", json.dumps({"model_type": "llama", "quantization_config": GROUPS})),
        ("chat_template.json", json.dumps({"chat_template": "\ud800"})),
        ("header", json.dumps({"a": {"dtype": FORGED, "shape": [1], "data_offsets": [0, 1]}})),
    ],
    ids=["index", "shard", "quantization", "half a character", "dtype"],
)
def test_what_a_file_says_is_quoted_on_one_short_line(checkpoint, name, content):
    if name == "model.safetensors.index.json":
        (checkpoint.folder / "model.safetensors").unlink()
    written = content.encode()
    if name == "header":
        name, written = "model.safetensors", len(written).to_bytes(8, "little") + written
    (checkpoint.folder / name).write_bytes(written)
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint.folder, checkpoint.folder.parent / "export")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.threat("checkpoint-json")
def test_a_name_of_any_length_fills_no_terminal(checkpoint):
    checkpoint.tensors["m" * (LONGEST_NAME + 1)] = np.zeros(1, np.float32)
    checkpoint.write_weights()
    with pytest.raises(CheckpointError, match=f"a tensor's name of {LONGEST_NAME + 1} characters") as caught:
        read_checkpoint(checkpoint.folder)
    assert len(str(caught.value)) < 500


@pytest.mark.threat("checkpoint-json")
def test_a_shape_of_a_hundred_thousand_numbers_is_not_multiplied(checkpoint):
    entry = {"dtype": "F32", "shape": [10**39] * 100_000, "data_offsets": [0, 0]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (checkpoint.folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"entry for model\.norm\.weight is corrupt"):
        read_checkpoint(checkpoint.folder)


@pytest.mark.threat("checkpoint-numbers")
@pytest.mark.parametrize("name", RANGES)
def test_every_number_has_a_range(name):
    low, high = RANGES[name]
    whole = type(low) is type(high) is int and name not in ("rms_norm_eps", "min_p", "temperature")
    for value in (low, high):
        assert read(name, value if whole else float(value), whole) == value
    beyond = (
        [low - 1, high + 1] if whole else [low - abs(low) / 2 - 1e-30, high * 1.001, 1e308, float("nan"), float("inf")]
    )
    for wrong in [*beyond, -1e308, "1", True, [1]]:
        with pytest.raises(CheckpointError, match=f"where: {name}=.* is unsupported; expected a"):
            read(name, wrong, whole)


def read(name: str, value: Any, whole: bool) -> float:
    keys = Keys({name: value}, "where")
    return keys.integer(name) if whole else keys.number(name)
