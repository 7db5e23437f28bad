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

from llmc.errors import BundleError, UsageError
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


# ---------------------------------------------------------------------------------------------------------- plain text


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


def test_equal_requests_give_equal_windows(read, file):
    path = file(PROSE)
    assert np.array_equal(read(path, samples=9).ids, read(path, samples=9).ids)


def test_every_window_begins_as_a_prompt_does(read, file, tokenizer, model_folder):
    found = read(file(PROSE), model_folder(bos="<|im_start|>")).ids
    assert set(found[:, 0]) == {tokenizer.token_to_id("<|im_start|>")}
    ids = tokens(tokenizer, PROSE)
    assert found[:, 1:].ravel().tolist() == ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)]


def test_special_tokens_in_a_text_are_read_as_such(read, file, tokenizer):
    found = read(file(f"{PROSE}<|endoftext|>{PROSE}"))
    assert found.tokens == 2 * len(tokens(tokenizer, PROSE)) + 1
    assert (found.ids == tokenizer.token_to_id("<|endoftext|>")).sum() == 1


def test_a_byte_order_mark_is_no_part_of_the_text(read, file):
    assert np.array_equal(read(file(b"\xef\xbb\xbf" + PROSE.encode())).ids, read(file(PROSE)).ids)


def test_fewer_windows_than_the_least_are_enough_if_no_more_are_wanted(read, file, tokenizer):
    text = tokenizer.decode(tokens(tokenizer, PROSE)[: 3 * LENGTH])
    assert read(file(text), samples=3).ids.shape == (3, LENGTH)
    with pytest.raises(UsageError, match="too short"):
        read(file(text), samples=4)


# --------------------------------------------------------------------------------------------------------------- chats


@pytest.mark.parametrize(
    "line", [{"messages": CHAT}, CHAT, {"id": 7, "messages": CHAT, "text": "unused"}, {"text": RENDERED}]
)
def test_conversations_are_rendered_and_follow_each_other_with_the_end_of_text_between(read, file, tokenizer, line):
    expected = tokens(tokenizer, "<|endoftext|>".join([RENDERED] * 20))
    found = read(file([line] * 20, "chats.jsonl"))
    assert found.tokens == len(expected)
    assert found.ids.ravel().tolist() == expected[: found.ids.size]
    assert (found.name, found.default) == ("chats.jsonl", False)


def test_chats_get_no_special_tokens_but_those_of_their_template(read, file, tokenizer, model_folder):
    found = read(file([CHAT] * 20, "chats.JSONL"), model_folder(bos="<|im_end|>"))
    assert found.tokens == len(tokens(tokenizer, "<|endoftext|>".join([RENDERED] * 20)))


def test_without_an_end_of_text_conversations_touch(read, file, tokenizer, model_folder):
    found = read(file([CHAT] * 20, "chats.jsonl"), model_folder(eos=None))
    assert found.tokens == 20 * len(tokens(tokenizer, RENDERED))


def test_templates_see_the_tools(read, file, tokenizer, model_folder):
    folder = model_folder(template="{% for tool in tools %}{{ tool.name }}{% endfor %}")
    found = read(file([{"messages": CHAT, "tools": [{"name": "look_up"}]}] * 60, "c.jsonl"), folder)
    assert found.tokens == len(tokens(tokenizer, "<|endoftext|>".join(["look_up"] * 60)))


def test_templates_see_the_same_date_on_every_day(read, file, tokenizer, model_folder):
    template = "{{ date_string if date_string is defined else strftime_now('%H:%M:%S %d %b %Y') }}"
    found = read(file([CHAT] * 60, "c.jsonl"), model_folder(template=template))
    assert found.tokens == len(tokens(tokenizer, "<|endoftext|>".join(["01 Jan 2025"] * 60)))


def test_lines_end_at_line_feeds_only_and_blank_ones_are_skipped(read, file, tokenizer):
    text = "one\u2028two\u0085three " * 20
    line = json.dumps({"text": text}, ensure_ascii=False)
    found = read(file(f"\n{line}\r\n \n{line}", "c.jsonl"))
    assert found.tokens == len(tokens(tokenizer, f"{text}<|endoftext|>{text}"))


def test_a_model_without_a_chat_template_reads_texts_and_refuses_chats(read, file, model_folder):
    folder = model_folder(template=None)
    assert read(file([{"text": PROSE}], "c.jsonl"), folder).ids.shape[1] == LENGTH
    with pytest.raises(UsageError, match=r"c\.jsonl: line 2: .*the model has no chat template"):
        read(file([{"text": PROSE}, CHAT], "c.jsonl"), folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'role': 'user'}", r"is not JSON \(Expecting property name.*\); expected \{\"messages\": "),
        ("[" * 100_000, r"is not JSON \(maximum recursion depth"),
        ("1" * 5000, r"is not JSON \(Exceeds the limit"),
        ("17", "holds 17, expected"),
        ("[]", r"holds \[\], expected"),
        ("{}", r"holds \{\}, expected"),
        ('{"conversations": [{"from": "human"}]}', "holds an object with the keys 'conversations' and no messages"),
        ('{"messages": []}', "holds an object with the keys 'messages' and no messages"),
        ('{"text": 3}', "holds an object with the keys 'text' and no messages"),
        ('{"messages": "hello"}', "messages is a str, expected a list"),
        ('[{"from": "human", "value": "hello"}]', r"messages\[0\] has the role None, expected text"),
        ('[{"role": "user"}]', r"messages\[0\] has the content None, expected text"),
        (r'{"text": "\ud800"}', r"the text is not valid Unicode: character 0 is the lone surrogate U\+D800"),
    ],
)
def test_a_line_that_holds_no_conversation_is_refused_with_its_number(read, file, line, message):
    with pytest.raises(UsageError, match=rf"chats\.jsonl: line 3:? {message}"):
        read(file(f"{json.dumps(CHAT)}\n\n{line}\n", "chats.jsonl"))


def test_a_conversation_that_the_template_refuses_is_named(read, file, model_folder):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}fine"
    with pytest.raises(UsageError, match="line 2: the model's chat template refuses the messages: users begin"):
        read(file([CHAT, CHAT[1:]], "c.jsonl"), model_folder(template=template))


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt is empty, expected text; give a file of UTF-8 text"),
        (b" \n\t\r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (PROSE.encode() + b"\0" + b"x" * 99, f"is not UTF-8 text: byte {len(PROSE.encode())} is 0x00; convert"),
        (b"caf\xe9 " * 100, "byte 3 is 0xE9; convert it to UTF-8 if it is text at all"),
        (b"\xef\xbb\xbfcaf\xe9 ", "byte 6 is 0xE9"),
        (PROSE.encode("utf-16"), "byte 0 is 0xFF"),
        (b"ends within a char: \xe5\x8c", "byte 20 is 0xE5"),
        (b"\xe5\0", "byte 0 is 0xE5"),
        (b"word " * 20, r"is too short: \d+ tokens, expected at least 128; give a longer text"),
    ],
)
def test_a_file_that_does_not_serve_is_refused_in_one_sentence(read, file, content, message):
    with pytest.raises(UsageError, match=message) as caught:
        read(file(content))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(read, tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt cannot be read \(No such file or directory\); give a file"):
        read(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="is not a regular file; give a file"):
        read(tmp_path)
    with pytest.raises(UsageError, match="is not a regular file"):
        read(Path("/dev/zero"))


def test_a_short_text_is_refused_with_what_it_has_and_what_it_needs(read, file, tokenizer):
    text = tokenizer.decode(tokens(tokenizer, PROSE)[: 8 * LENGTH - 1])
    with pytest.raises(UsageError, match=r"too short: 127 tokens, expected at least 128;"):
        read(file(text))


def test_a_token_beyond_the_models_vocabulary_is_refused(read, file, tokenizer):
    highest = max(tokens(tokenizer, PROSE))
    assert read(file(PROSE), vocab_size=highest + 1).ids.max() == highest
    text = re.escape(repr(tokenizer.decode([highest])))
    message = rf"{text} is token {highest}, but the model's vocabulary ends at {highest - 1}; take it out"
    with pytest.raises(UsageError, match=message):
        read(file(PROSE), vocab_size=highest)


def test_a_beginning_of_prompt_beyond_the_vocabulary_is_refused(read, file, tokenizer, model_folder):
    folder = model_folder(bos=tokenizer.id_to_token(VOCABULARY - 1))
    with pytest.raises(UsageError, match=f"is token {VOCABULARY - 1}"):
        read(file(PROSE), folder, vocab_size=VOCABULARY - 1)


def test_a_folder_without_a_tokenizer_is_refused(read, file, tmp_path):
    with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
        read(file(PROSE), tmp_path)


# --------------------------------------------------------------------------------------------------------- large files


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


def test_a_file_of_just_the_limit_is_used_whole(read, file, tokenizer, at_most, caplog):
    at_most(len(PROSE.encode()))
    assert read(file(PROSE)).tokens == len(tokens(tokenizer, PROSE))
    assert not caplog.records


@pytest.mark.parametrize("size", [900, 901, 902, 903])
def test_a_character_cut_by_the_limit_is_dropped(read, file, tokenizer, at_most, size):
    at_most(size)
    assert read(file("北京" * 1000)).tokens == len(tokens(tokenizer, ("北京" * 1000)[: size // 3]))


def test_a_wrong_byte_before_the_limit_is_still_refused(read, file, at_most):
    at_most(900)
    with pytest.raises(UsageError, match="byte 890 is 0xE9"):
        read(file(b"x" * 890 + b"\xe9" + b"y" * 9000))


def test_of_a_large_jsonl_the_whole_lines_before_the_limit_are_used(read, file, tokenizer, at_most):
    path = file([CHAT] * 100, "c.jsonl")
    at_most(30 * len(json.dumps(CHAT) + "\n") + 50)
    assert read(path).tokens == len(tokens(tokenizer, "<|endoftext|>".join([RENDERED] * 30)))


def test_a_line_beyond_the_limit_is_refused(read, file, at_most):
    path = file([{"text": PROSE}], "c.jsonl")
    at_most(1000)
    with pytest.raises(UsageError, match="line 1 is longer than 1000 bytes"):
        read(path)
    with pytest.raises(UsageError, match="too short: 0 tokens"):
        read(file(b"\n\n" + path.read_bytes(), "d.jsonl"))


# -------------------------------------------------------------------------------------------------------- default text

# A Basic Multilingual Plane range for each script that the text must hold.
SCRIPTS = {
    "Latin with accents": "À-ſ",
    "Cyrillic": "Ѐ-ӿ",
    "Arabic": "؀-ۿ",
    "Devanagari": "ऀ-ॿ",
    "Kana": "぀-ヿ",
    "Han": "一-鿿",
    "Hangul": "가-힣",
}
KINDS = ("```python", "```json", "```sql", "```yaml", "#include", "Traceback", "diff --git", "| Chemistry |", "Dear ")


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


def test_the_default_text_serves_any_length_up_to_its_own(read):
    total = read(None).tokens
    assert read(None, length=total).ids.shape == (1, total)
    with pytest.raises(UsageError, match=rf"too short: {total} tokens, expected at least {total + 1}; give a longer"):
        read(None, length=total + 1)


def test_the_default_text_is_varied(default_text):
    assert 40_000 <= len(default_text.encode()) <= 60_000
    assert [name for name, found in SCRIPTS.items() if len(re.findall(f"[{found}]", default_text)) < 80] == []
    assert [kind for kind in KINDS if kind not in default_text] == []


def test_the_default_text_does_not_repeat_itself(default_text):
    lines = [line for line in default_text.split("\n") if len(line) > 40]
    assert len(set(lines)) == len(lines)


def test_the_default_text_holds_no_special_tokens_of_known_models(default_text):
    marks = ("<|", "|>", "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "[INST]", "<think>", "<start_of_turn>")
    assert [mark for mark in marks if mark in default_text] == []


def test_the_default_text_is_clean(default_text):
    assert default_text.endswith("\n") and "\r" not in default_text and "\t" not in default_text
    assert [line for line in default_text.split("\n") if line != line.rstrip()] == []
    assert default_text.isprintable() or not [c for c in default_text if not c.isprintable() and c not in "\n"]
