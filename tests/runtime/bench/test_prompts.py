"""Prompts are as long as asked for, share what they should, and follow from the seed or the file."""

from pathlib import Path

import pytest

from llmc.errors import UsageError
from llmc.runtime.bench.prompts import WORDS, Length, WordCount, drawn, from_file, read_length, word_count


def test_lengths_are_a_number_or_a_range():
    assert (read_length("128", "x"), read_length("16-32", "x")) == (Length(128, 128), Length(16, 32))
    drawn = [Length(3, 5).draw(0, number) for number in range(60)]
    assert set(drawn) == {3, 4, 5}


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "5-3", "1-2-3", "1.5"])
def test_other_lengths_are_refused_by_the_name_of_the_parameter(text: str):
    with pytest.raises(UsageError, match="max_tokens is"):
        read_length(text, "max_tokens")


def test_words_are_as_many_as_the_server_makes_the_tokens_of():
    count = word_count((64, 87), (128, 167))  # 1.25 tokens for a word, and 7 of the template
    assert count == WordCount(1.25, 7.0)
    assert [count.words(tokens) for tokens in (107, 3)] == [80, 1]


def test_a_server_that_counts_nonsense_is_not_believed():
    assert word_count((64, 5), (128, 5)) == WordCount()


def test_prompts_follow_from_the_seed_and_differ_from_one_another():
    prompt = drawn(Length(20, 20), 0.0, 1, WordCount())
    assert prompt(0) == prompt(0) != prompt(1)
    assert prompt(0) != drawn(Length(20, 20), 0.0, 2, WordCount())(0)
    assert {len(str(prompt(number)).split()) for number in range(5)} == {20}
    assert set(str(prompt(0)).split()) <= set(WORDS)


def test_the_first_share_of_every_prompt_begins_the_same_text():
    prompt = drawn(Length(10, 40), 0.5, 0, WordCount())
    prompts = [str(prompt(number)).split() for number in range(8)]
    shortest = min(map(len, prompts))
    assert len({tuple(words[: shortest // 2]) for words in prompts}) == 1
    assert len({tuple(words[-5:]) for words in prompts}) == 8


def test_all_may_be_shared():
    prompt = drawn(Length(9, 9), 1.0, 0, WordCount())
    assert prompt(0) == prompt(1)


def test_a_file_has_a_prompt_in_each_line_which_take_turns(tmp_path: Path):
    (tmp_path / "p.txt").write_text('one\n\n["two"]\n', encoding="utf-8")
    prompt = from_file(tmp_path / "p.txt")
    assert [prompt(number) for number in range(3)] == ["one", '["two"]', "one"]


def test_jsonl_has_messages_or_texts(tmp_path: Path):
    messages = '[{"role": "user", "content": "a"}]'
    lines = [messages, f'{{"messages": {messages}}}', '{"prompt": "b"}', '"c"']
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    prompt = from_file(tmp_path / "p.jsonl")
    chat = [{"role": "user", "content": "a"}]
    assert [prompt(number) for number in range(4)] == [chat, chat, "b", "c"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no prompt"),
        (b"\xff", "expected UTF-8"),
        (b'"a"\n{', ":2: it is no JSON"),
        (b'{"text": "a"}', ":1: expected a list of messages"),
        (b'["a"]', ":1: expected a list of messages"),
    ],
)
def test_files_without_prompts_are_refused_by_line(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        from_file(path)
