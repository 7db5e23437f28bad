"""Answers of models that hear become transcripts, however they are split."""

import pytest

from llmc.errors import UsageError
from llmc.runtime.api.transcript import TranscriptParser, find_language, make_messages

OPENING = "language {language}<asr_text>"


def parse(text: str, size: int, *, opened: bool = False) -> str:
    """The transcript in an answer that comes in pieces of this many characters."""
    parser = TranscriptParser(OPENING, opened)
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join(piece.content for piece in [*pieces, parser.finish()])


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("language English<asr_text>Hello  there. ", "Hello  there."),
        ("language None<asr_text>", ""),
        (" \n", ""),
        ("Hello without an opening.", "Hello without an opening."),
        ("language English<asr_text>a<asr_text>b", "a<asr_text>b"),
    ],
)
def test_the_text_after_the_opening_is_the_transcript(text, wanted, size):
    assert parse(text, size) == wanted


def test_an_opening_in_the_prompt_is_not_looked_for():
    parser = TranscriptParser(OPENING, True)
    assert parser.push(" Hello ").content == "Hello" and parser.push("there").content == " there"


def test_languages_are_known_by_name_and_code():
    assert [find_language(given) for given in ("en", "English", "YUE", None)] == [
        "English",
        "English",
        "Cantonese",
        None,
    ]
    with pytest.raises(UsageError, match="language is 'eng', expected one of ar"):
        find_language("eng")


def test_an_empty_prompt_is_none():
    assert [message["role"] for message in make_messages(b"", "", "")] == ["user"]
    assert [message["role"] for message in make_messages(b"", "a", "b")] == ["system", "user", "assistant"]
