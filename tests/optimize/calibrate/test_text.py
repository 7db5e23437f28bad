"""Texts and chats become windows of tokens, or one clear sentence."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from llmc.errors import UsageError
from llmc.optimize.calibrate import text
from llmc.optimize.calibrate.text import DEFAULT_TEXT, CalibrationSamples, read_samples

VOCABULARY = 4096
LENGTH = 16
PROSE = "".join(f"Line {i} of a text: naïve café, 北京, and {i * i} squared.\n" for i in range(40))
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of the wind."}]
# What the small model's template makes of it, written out.
RENDERED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause of the wind.<|im_end|>\n"


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(content: str | bytes | list[Any], name: str = "text.txt") -> Path:
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def read(tiny_checkpoint: Path) -> Callable[..., CalibrationSamples]:
    def call(path: Path | None, folder: Path = tiny_checkpoint, **changes: int) -> CalibrationSamples:
        sizes = {"samples": 1000, "length": LENGTH, "vocab_size": VOCABULARY} | changes
        return read_samples(path, folder, **sizes)

    return call


@pytest.fixture
def model_folder(tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """The small model's tokenizer, which puts ``bos`` before a prompt, or with another template, or none."""

    def make(bos: str | None = None, template: str | None = "", eos: str | None = "") -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_checkpoint / name, folder)
        if bos:
            changed = Tokenizer.from_file(str(folder / "tokenizer.json"))
            special = [(bos, changed.token_to_id(bos))]
            changed.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=special)
            changed.save(str(folder / "tokenizer.json"))
        if template is None:
            (folder / "chat_template.jinja").unlink()
        elif template:
            (folder / "chat_template.jinja").write_text(template)
        if eos is None:
            (folder / "tokenizer_config.json").write_text("{}")
        return folder

    return make


def test_windows_follow_each_other_through_the_text(read, file, tokenizer):
    path, ids = file(PROSE), tokens(tokenizer, PROSE)
    found = read(path)
    assert found.ids.dtype == np.int64
    assert found.ids.shape == (len(ids) // LENGTH, LENGTH)
    assert found.ids.ravel().tolist() == ids[: found.ids.size]
    assert (found.name, found.default, found.tokens) == ("text.txt", False, len(ids))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("samples", [1, 2, 7, 40])
def test_a_longer_text_gives_windows_from_all_over_it(read, file, samples):
    path = file(" ".join(map(str, range(1000, 1250))))
    every = read(path).ids.tolist()
    assert len(set(map(tuple, every))) == len(every) > 40
    found = read(path, samples=samples).ids.tolist()
    places = [every.index(window) for window in found]
    gaps = np.diff([*places, len(every)])
    assert places[0] == 0 and len(places) == samples
    assert gaps.max() - gaps.min() <= 1 and gaps.min() >= 1


@pytest.mark.parametrize(
    "line", [{"messages": CHAT}, CHAT, {"id": 7, "messages": CHAT, "text": "unused"}, {"text": RENDERED}]
)
def test_conversations_are_rendered_and_follow_each_other_with_the_end_of_text_between(read, file, tokenizer, line):
    expected = tokens(tokenizer, "<|endoftext|>".join([RENDERED] * 20))
    found = read(file([line] * 20, "chats.jsonl"))
    assert found.tokens == len(expected)
    assert found.ids.ravel().tolist() == expected[: found.ids.size]
    assert (found.name, found.default) == ("chats.jsonl", False)


def test_a_model_without_a_chat_template_reads_texts_and_refuses_chats(read, file, model_folder):
    folder = model_folder(template=None)
    assert read(file([{"text": PROSE}], "c.jsonl"), folder).ids.shape[1] == LENGTH
    with pytest.raises(UsageError, match=r"c\.jsonl: line 2 .*the model has no chat template"):
        read(file([{"text": PROSE}, CHAT], "c.jsonl"), folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'role': 'user'}", r"is not JSON \(Expecting property name.*\), expected \{\"messages\": "),
        ("[" * 100_000, r"is not JSON \(maximum recursion depth"),
        ("17", "is 17, expected"),
        ('{"conversations": [{"from": "human"}]}', r"is \{'conversations': "),
        ('{"messages": []}', r"is \{'messages': \[\]\}"),
        ('{"text": 3}', r"is \{'text': 3\}"),
        ('{"messages": "hello"}', ".*messages is 'hello', expected a list"),
        ('[{"from": "human", "value": "hello"}]', r".*messages\[0\] has the role None, expected text"),
        (r'{"text": "\ud800"}', r".*the text is not valid Unicode: character 0 is the lone surrogate U\+D800"),
    ],
)
def test_a_line_that_holds_no_conversation_is_refused_with_its_number(read, file, line, message):
    with pytest.raises(UsageError, match=rf"chats\.jsonl: line 3 {message}"):
        read(file(f"{json.dumps(CHAT)}\n\n{line}\n", "chats.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt: text is empty, expected one; give a file of UTF-8 text"),
        (b"\xef\xbb\xbf", "is empty"),
        (PROSE.encode() + b"\0" + b"x" * 99, "it holds zero bytes"),
        (b"caf\xe9 " * 100, "at byte 3"),
        (b"ends within a char: \xe5\x8c", "at byte 20"),
        (b"word " * 20, r"is too short: \d+ tokens, expected at least 128; give a longer one"),
    ],
)
def test_a_file_that_does_not_serve_is_refused_in_one_sentence(read, file, content, message):
    with pytest.raises(UsageError, match=message) as caught:
        read(file(content))
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_models_vocabulary_is_refused(read, file, tokenizer):
    highest = max(tokens(tokenizer, PROSE))
    assert read(file(PROSE), vocab_size=highest + 1).ids.max() == highest
    text = re.escape(repr(tokenizer.decode([highest])))
    message = rf"{text}, which is token {highest}, but the model's vocabulary ends at {highest - 1}; take it out"
    with pytest.raises(UsageError, match=message):
        read(file(PROSE), vocab_size=highest)


@pytest.fixture
def at_most(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr(text, "READ_AT_MOST", size)


def test_of_a_large_file_the_beginning_is_used_and_all_is_hashed(read, file, tokenizer, at_most, caplog):
    path = file(PROSE.encode() + b"\xff\0" * 1_000_000)
    at_most(2000)
    found = read(path)
    assert found.tokens == len(tokens(tokenizer, PROSE.encode()[:2000].decode(errors="ignore")))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is large: only its first 2000 bytes are used"
    ]


@pytest.mark.parametrize("size", [900, 901, 902])
def test_a_character_cut_by_the_limit_is_dropped(read, file, tokenizer, at_most, size):
    at_most(size)
    assert read(file("北京" * 1000)).tokens == len(tokens(tokenizer, ("北京" * 1000)[: size // 3]))


@pytest.fixture(scope="session")
def default_text() -> str:
    return DEFAULT_TEXT.read_bytes().decode()


def test_without_a_file_the_default_text_is_read_and_says_so(read, default_text, tokenizer):
    found = read(None, length=512, samples=64)
    assert (found.name, found.default) == ("default text", True)
    assert found.sha256 == hashlib.sha256(default_text.encode()).hexdigest()
    assert found.ids.shape == (found.tokens // 512, 512)


def test_quality_is_judged_on_a_part_of_the_default_text_that_calibration_does_not_see(read, default_text, tokenizer):
    paragraphs = default_text.split("\n\n")
    seen, held = (read(None, length=64, samples=10**6, held_out=held_out) for held_out in (False, True))
    assert held.tokens == len(tokens(tokenizer, "\n\n".join(paragraphs[3::4])))
    del paragraphs[3::4]
    assert seen.tokens == len(tokens(tokenizer, "\n\n".join(paragraphs)))
    assert held.tokens > seen.tokens / 5  # enough to judge on


def test_the_default_text_holds_no_special_tokens_of_known_models(default_text):
    marks = ("<|", "|>", "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "[INST]", "<think>", "<start_of_turn>")
    assert [mark for mark in marks if mark in default_text] == []
