"""Tokenizers rebuilt from GGUF metadata: llama.cpp's tokens, and what chats and prompts need beside them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tokenizers
from doubles.llamacpp_tokens import RECORDED, digest, texts, vocabularies

from llmc.errors import CheckpointError
from llmc.export.sources.gguf.pretokenizers import PRE_TOKENIZERS
from llmc.export.sources.gguf.tokenizer import LONGEST_TOKEN, Tokenizer, read_tokenizer

VOCABULARIES = vocabularies()


def rebuilt(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of this metadata, in which arrays are as a header has them."""
    metadata = {}
    for key, value in values.items():
        numbers = isinstance(value, list) and value and not isinstance(value[0], str)
        metadata[key if "." in key else f"tokenizer.ggml.{key}"] = np.array(value) if numbers else value
    return read_tokenizer("model.gguf", metadata)


def tokens_of(values: Mapping[str, Any]) -> list[list[int]]:
    backend = tokenizers.Tokenizer.from_str(json.dumps(rebuilt(values).json))
    return [encoding.ids for encoding in backend.encode_batch(texts())]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_of_500_texts_are_those_of_llama_cpp(name):
    recorded = json.loads(RECORDED.read_text())["sha256"]
    assert digest(tokens_of(VOCABULARIES[name])) == recorded[name]


def test_each_other_pre_tokenizer_would_be_noticed():
    """All but those that are one under several names."""
    patterns = {PRE_TOKENIZERS[name].patterns: name for name in VOCABULARIES if name in PRE_TOKENIZERS}
    same = [digest(tokens_of({**VOCABULARIES["qwen35"], "pre": name})) for name in patterns.values()]
    assert len(set(same)) == len(same)


WORDS: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<bos>", "<eos>", "<|im_end|>", "<think>", "a", "b", "ab", "[PAD7]"],
    "token_type": [3, 3, 3, 4, 1, 1, 1, 5],
    "merges": ["a b"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [6]),
        ({"add_bos_token": True}, [0, 6]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 6, 1]),
        ({"pre": "llama-bpe"}, [0, 6]),  # unless the file says otherwise
        ({"pre": "llama-bpe", "add_bos_token": False}, [6]),
    ],
)
def test_tokens_stand_around_a_prompt_as_the_file_says(changes, expected):
    backend = tokenizers.Tokenizer.from_str(json.dumps(rebuilt({**WORDS, **changes}).json))
    assert backend.encode("ab").ids == expected


def test_special_tokens_and_the_ends_of_a_text_are_named():
    found = rebuilt({**WORDS, "padding_token_id": 1, "tokenizer.chat_template": "{{ messages }}"})
    named = {key: value for key, value in found.config.items() if key.endswith("_token") or key == "chat_template"}
    assert named == {
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>", "chat_template": "{{ messages }}",
    }  # fmt: skip
    assert (found.bos, found.ends) == (0, (1, 2))  # and <|im_end|>, which is known by its text
    special = {token["content"]: token["special"] for token in found.json["added_tokens"]}
    assert special == {"<bos>": True, "<eos>": True, "<|im_end|>": True, "<think>": False}
    assert "[PAD7]" not in found.json["model"]["vocab"]


@pytest.mark.parametrize("kind", [1, 3, 4, 5], ids=["normal", "control", "user-defined", "unused"])
def test_tokens_of_turns_are_special_whatever_type_the_file_gives_them(kind):
    """As llama.cpp has it: <|im_end|> ends an answer by its text."""
    tokens = [*WORDS["tokens"][:3], "<|im_start|>", *WORDS["tokens"][4:]]
    found = rebuilt({**WORDS, "tokens": tokens, "token_type": [3, 3, kind, kind, 1, 1, 1, 5]})
    assert found.ends == (1, 2)
    assert {token["content"] for token in found.json["added_tokens"] if token["special"]} == {*tokens[:4]}
    backend = tokenizers.Tokenizer.from_str(json.dumps(found.json))
    assert backend.encode("<|im_start|>ab<|im_end|>").ids == [3, 6, 2]


@pytest.mark.parametrize(("other", "ends"), [("<|call|>", {1, 2, 3}), ("<think>", {1, 3, 7})])
def test_harmonys_messages_end_before_its_answers(other, ends):
    tokens = ["<bos>", "<eos>", other, "<|return|>", "a", "b", "ab", "<|end|>"]
    found = rebuilt({**WORDS, "tokens": tokens, "token_type": [3, 3, 3, 3, 1, 1, 1, 3]})
    assert {*found.ends} == ends


def test_several_chat_templates_keep_their_names():
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    found = rebuilt({**WORDS, **templates, "tokenizer.chat_templates": ["tool_use"]}).config["chat_template"]
    assert found == [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


PIECES: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "token_type": [2, 3, 3, 1, 1, 1],
    "scores": [0.0, 0.0, 0.0, -2.0, -1.0, 0.0],
}


@pytest.mark.threat("gguf-tokenizer")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is unsupported; expected gpt2, llama or gemma4"),
        ({"model": None}, "tokenizer.ggml.model=None is unsupported"),
        ({"pre": "brand-new"}, "tokenizer.ggml.pre='brand-new' is unsupported; expected one of gpt-2, "),
        ({"pre": None}, "tokenizer.ggml.pre=None is unsupported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": 3}, "tokenizer.ggml.tokens is missing, or not a list of texts"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type is missing, or not a number for each of the tokens"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "the merge 'ab' does not join two tokens to a third"),
        ({"merges": ["a a"]}, "the merge 'a a' does not join two tokens to a third"),
        ({"merges": ["a b"] * 2_000_000}, "it has 2000000 merges, expected at most 1048576"),
        ({"tokens": [*WORDS["tokens"][:6], "b", ""]}, "tokens 5 and 6 are both 'b'"),
        ({"bos_token_id": -1}, "bos_token_id=-1 is unsupported; expected an id below 8"),
        ({"bos_token_id": "0"}, "bos_token_id='0' is unsupported"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            "a text has a token bos around it, but bos_token_id is missing",
        ),
        ({"add_bos_token": 1}, "add_bos_token=1 is unsupported; expected true or false"),
        ({"tokenizer.chat_template": 3}, "a chat template is not a text"),
        ({"tokenizer.chat_templates": ["tool_use"]}, "a chat template is not a text"),
    ],
)
def test_what_no_byte_pair_encoding_has_is_refused(changes, words):
    with pytest.raises(CheckpointError) as caught:
        rebuilt({**WORDS, **changes})
    assert words in str(caught.value)


@pytest.mark.threat("gguf-tokenizer")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0] * 5 + [float("nan")]}, "a score is not a number"),
        ({"tokens": [*PIECES["tokens"][:5], "x" * (LONGEST_TOKEN + 1)]}, "its tokens have more than 1024 characters"),
        ({"add_space_prefix": "yes"}, "add_space_prefix='yes' is unsupported"),
    ],
)
def test_what_no_sentencepiece_has_is_refused(changes, words):
    with pytest.raises(CheckpointError) as caught:
        rebuilt({**PIECES, **changes})
    assert words in str(caught.value)


def test_an_id_without_a_token_is_left_out_with_a_note():
    found = rebuilt({**WORDS, "eos_token_id": 8})
    assert (found.ends, found.notes) == ((2,), ("eos_token_id=8 was left out, since the file has 8 tokens",))
