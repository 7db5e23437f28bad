"""Tokens that a tokenizer knows and the model has no rows for stay plain text, in every file that names them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from doubles import encoders
from doubles.ggufs import TOKENIZER, write_gguf

from llmc.bundle import read_export
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.tokens import cut_tokenizer
from llmc.runtime.text.tokenizer import Tokenizer

ROWS = 16
IMAGE = "<image_soft_token>"
LETTERS = {**{letter: index for index, letter in enumerate("<>_aefgikmnost")}, "<bos>": 14}  # 15 tokens
BPE: dict[str, Any] = {"type": "BPE", "vocab": LETTERS, "merges": [], "byte_fallback": False}


def added(token: str, number: int, **changes: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, "special": True, **plain, **changes}


def tokenizer_json(*tokens: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {"version": "1.0", "added_tokens": [added("<bos>", 14), *tokens], "model": {**BPE, **model}}


def without_id(token: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in token.items() if name != "id"}


# By what names the token: contents of files, of which the last letter's number is 15.
NAMES: dict[str, dict[str, dict[str, Any]]] = {
    "an added token": {"tokenizer.json": tokenizer_json(added("x", 15), added(IMAGE, 16))},
    "an added token that is not special": {
        "tokenizer.json": tokenizer_json(added("x", 15), added(IMAGE, 16, special=False))
    },
    "one far away": {"tokenizer.json": tokenizer_json(added("x", 15), added(IMAGE, 262_144))},
    "the vocabulary too": {"tokenizer.json": tokenizer_json(added(IMAGE, 16), vocab={**LETTERS, "x": 15, IMAGE: 16})},
    "the vocabulary alone": {"tokenizer.json": tokenizer_json(vocab={**LETTERS, "x": 15, IMAGE: 16})},
    "merges": {
        "tokenizer.json": tokenizer_json(
            added("st", 16), added(IMAGE, 17), vocab={**LETTERS, "x": 15, "st": 16}, merges=[["s", "t"]]
        )
    },
    "merges of one line": {
        "tokenizer.json": tokenizer_json(
            added("st", 16), added(IMAGE, 17), vocab={**LETTERS, "x": 15, "st": 16}, merges=["s t"]
        )
    },
    "the config's tokens": {
        "tokenizer.json": tokenizer_json(added("x", 15)),
        "tokenizer_config.json": {"added_tokens_decoder": {"16": without_id(added(IMAGE, 16))}},
    },
    "both files": {
        "tokenizer.json": tokenizer_json(added("x", 15), added(IMAGE, 16)),
        "tokenizer_config.json": {
            "added_tokens_decoder": {"15": without_id(added("x", 15)), "16": without_id(added(IMAGE, 16))},
            "image_token": IMAGE,
            "extra_special_tokens": {"image_token": IMAGE},
        },
    },
    "a named token": {
        "tokenizer.json": tokenizer_json(added("x", 15)),
        "tokenizer_config.json": {"pad_token": IMAGE, "bos_token": "<bos>"},
    },
    "a list of extra tokens": {
        "tokenizer.json": tokenizer_json(added("x", 15)),
        "tokenizer_config.json": {"additional_special_tokens": ["<bos>", {"content": IMAGE}]},
    },
    "the map of special tokens": {
        "tokenizer.json": tokenizer_json(added("x", 15)),
        "special_tokens_map.json": {"pad_token": {"content": IMAGE}, "bos_token": "<bos>"},
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_a_row_is_spelled_by_others(checkpoint, name):
    for file, content in NAMES[name].items():
        (checkpoint.folder / file).write_text(json.dumps(content))
    found = read_checkpoint(checkpoint.folder)
    for file, text in found.texts.items():
        (checkpoint.folder / file).write_text(text)
    assert encode(checkpoint.folder) == SPELLED
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    assert tokenizer.vocab_size <= ROWS and tokenizer.token_to_id(IMAGE) is None
    assert IMAGE not in tokenizer.special_tokens.values()
    assert f"the model has {ROWS} rows and none for " in found.notes[0] and f"{IMAGE!r}" in found.notes[0]


def test_an_export_has_the_files_without_such_tokens(checkpoint, tmp_path):
    for file, content in NAMES["both files"].items():
        (checkpoint.folder / file).write_text(json.dumps(content))
    assert encode(checkpoint.folder)[0] >= ROWS  # planted: the files as they are
    folder = export(checkpoint.folder, tmp_path / "export").output
    assert encode(folder) == SPELLED and "none for '<image_soft_token>'" in read_export(folder).notes[0]


SPELLED = [*(LETTERS[letter] for letter in IMAGE), LETTERS["s"], LETTERS["t"], 15]


def encode(folder: Path) -> list[int]:
    return Tokenizer.from_folder(folder).encode(IMAGE + "stx")


USED: dict[str, dict[str, Any]] = {
    "a letter": tokenizer_json(vocab={**LETTERS, "x": 16}),
    "a merge": tokenizer_json(vocab={**LETTERS, "st": 16}, merges=["s t"]),
    "whole words": tokenizer_json(vocab={**LETTERS, "stone": 16}, ignore_merges=True),
    "a byte": tokenizer_json(vocab={**LETTERS, "<0x0A>": 16}, byte_fallback=True),
    "an unknown letter": tokenizer_json(added("<unk>", 16), unk_token="<unk>"),
    "Unigram's list": {"model": {"type": "Unigram", "vocab": [["a", 0.5]] * 16 + [["b", 0]]}},
    "the beginning of a text": {
        **tokenizer_json(added("<s>", 16)),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [16], "tokens": ["<s>"]}},
        },
    },
    "the end of a text, in a sequence": {
        **tokenizer_json(added("</s>", 16)),
        "post_processor": {
            "type": "Sequence",
            "processors": [{"type": "RobertaProcessing", "sep": ["</s>", 16], "cls": ["<bos>", 14]}],
        },
    },
}


@pytest.mark.threat("extra-tokens")
@pytest.mark.parametrize("name", USED)
def test_a_tokenizer_that_makes_such_tokens_of_text_is_another_models(checkpoint, name):
    """The graph would fail at the first text with such a token."""
    (checkpoint.folder / "tokenizer.json").write_text(json.dumps(USED[name]))
    with pytest.raises(
        CheckpointError, match=r"it has 17 tokens, .* tokens such as .* 16 rows \(vocab_size\); give it"
    ):
        read_checkpoint(checkpoint.folder)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": tokenizer_json(added(IMAGE, 16), merges=["st"])},
        {"tokenizer.json": tokenizer_json(added(IMAGE, 16), merges=[3])},
        {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}},
        {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": {"extra_special_tokens": 3}},
    ],
)
def test_broken_files_are_named(files):
    with pytest.raises(CheckpointError, match="its tokenizer is broken"):
        cut_tokenizer("folder", files, ROWS)


def test_a_tokenizer_that_fits_is_left_as_it_is(checkpoint):
    (checkpoint.folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(added("x", 15))))
    (checkpoint.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "pad_token": "x"}))
    found = read_checkpoint(checkpoint.folder)
    assert (dict(found.texts), found.notes) == ({}, ())


def test_numbers_of_tokens_without_rows_end_no_answer(checkpoint):
    checkpoint.set_config(eos_token_id=[2, 262_144], bos_token_id=262_145)
    (checkpoint.folder / "generation_config.json").write_text('{"eos_token_id": [16, 3, 2]}')
    found = read_checkpoint(checkpoint.folder)
    assert (found.generation.eos_token_ids, found.generation.bos_token_id) == ((3, 2), None)
    assert set(found.notes) == {
        "config.json: eos_token_id names 262144, but vocab_size=16: left out",
        "config.json: bos_token_id names 262145, but vocab_size=16: left out",
        "generation_config.json: eos_token_id names 16, but vocab_size=16: left out",
    }


def test_embedders_have_no_such_tokens_either(tmp_path):
    """EmbeddingGemma has 262,144 rows and the tokenizer of the models that see."""
    folder = encoders.write_embedder(tmp_path / "checkpoint", pooling="mean", **encoders.GEMMA)
    content = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    content["added_tokens"].append(added(IMAGE, rows))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert rows in tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(IMAGE).ids
    found = read_checkpoint(folder)
    assert max(tokenizers.Tokenizer.from_str(found.texts["tokenizer.json"]).encode(IMAGE).ids) < rows


def test_gguf_files_have_no_such_tokens_either(random_checkpoint, tmp_path):
    checkpoint = random_checkpoint("llama-biases", vocab_size=29)
    more = {"tokens": [*TOKENIZER["tokens"], "<abc>"], "token_type": [*TOKENIZER["token_type"], 3], "eos_token_id": 29}
    path = write_gguf(checkpoint, tmp_path / "m.gguf", tokenizer={**TOKENIZER, **more})
    found = read_checkpoint(path)
    backend = tokenizers.Tokenizer.from_str(found.texts["tokenizer.json"])
    assert backend.encode("abc").ids == [28, 4] and backend.token_to_id("<abc>") is None
    assert "eos_token" not in json.loads(found.texts["tokenizer_config.json"])
    assert not np.isin(29, found.generation.eos_token_ids)
    assert sum("none for '<abc>'" in note or "names 29" in note for note in found.notes) == 2
