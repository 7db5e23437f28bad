import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llmc.runtime.text.detokenizer import TextStream
from llmc.runtime.text.tokenizer import Tokenizer

# Tokens that are decoded for a token late in a long stream against early in it, where the window is shorter for a
# moment; re-reading everything would give about 20.
LATE_TO_EARLY = 1.2


@pytest.fixture(scope="session", params=["byte_level_folder", "metaspace_folder", "tiny_checkpoint"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_folder(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="session")
def metaspace(metaspace_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(metaspace_folder)


def until_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition, character by character."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], str | None]:
    text = TextStream(tokenizer, tuple(stops))
    parts = [text.push(token) for token in ids]
    return [*parts, text.finish()], text.stopped


def assert_equals_decoding_at_once(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()) -> None:
    parts, stopped = stream(tokenizer, ids, stops)
    assert ("".join(parts), stopped) == until_first_stop(tokenizer.decode(ids), stops)


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """A token for each byte, in the notation of the tokenizer's kind."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or tokenizer.token_to_id(names[byte]) for byte in content]
    return [token for token in ids if token is not None]


class TestStream:
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_of_any_tokens_equals_decoding_at_once(self, tokenizer, data):
        token = st.integers(0, tokenizer.vocab_size + 2)  # padded vocabularies have ids without a token
        ids = data.draw(st.lists(token, max_size=60))
        assert_equals_decoding_at_once(tokenizer, ids)

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_of_broken_utf8_equals_decoding_at_once(self, tokenizer, data):
        piece = st.one_of(
            st.text(st.sampled_from("aé北🎉\ufffd "), max_size=3).map(str.encode),
            st.sampled_from(
                [b"\xf0", b"\x9f", b"\x8e", b"\x89", b"\xe4", b"\xbd", b"\xc3", b"\xff", b"\xed\xa0", b"\xe0\x80"]
            ),
        )
        content = b"".join(data.draw(st.lists(piece, max_size=25)))
        assert_equals_decoding_at_once(tokenizer, byte_ids(tokenizer, content))

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_with_stop_strings_ends_where_the_first_is_complete(self, tokenizer, data):
        letters = st.text(st.sampled_from("ab 🎉"), min_size=1, max_size=4)
        text = data.draw(st.text(st.sampled_from("ab 🎉\n"), max_size=40))
        stops = data.draw(st.lists(letters, max_size=4))
        ids = data.draw(st.sampled_from([tokenizer.encode(text), byte_ids(tokenizer, text.encode())]))
        assert_equals_decoding_at_once(tokenizer, ids, stops)
        keeping = TextStream(tokenizer, stops, keep_stop=True)
        found = "".join([*map(keeping.push, ids), keeping.finish()])
        before, stop = until_first_stop(tokenizer.decode(ids), stops)
        assert (found, keeping.stopped) == (before + (stop or ""), stop)

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_never_takes_back_what_it_returned(self, tokenizer, data):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
        more = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
        text = TextStream(tokenizer, ("ab", "e "))
        returned = "".join(text.push(token) for token in ids)
        assert until_first_stop(tokenizer.decode([*ids, *more]), ("ab", "e "))[0].startswith(returned)

    def test_of_special_tokens_is_empty(self, byte_level):
        end = byte_level.token_to_id("<|end|>")
        assert end is not None and stream(byte_level, [end] * 20) == ([""] * 21, None)

    @pytest.mark.parametrize("silent", [2, 100_000], ids=["special", "padding"])
    def test_keeps_the_space_after_tokens_without_text(self, metaspace, silent):
        ids = [*metaspace.encode("the fox"), *[silent] * 20, *metaspace.encode("the fox")]
        assert "".join(stream(metaspace, ids)[0]) == metaspace.decode(ids) == "the fox the fox"

    @pytest.mark.parametrize("prepend", ["always", "first"])
    def test_of_a_metaspace_decoder_keeps_runs_of_spaces(self, prepend):
        backend = Backend(models.WordLevel({"▁": 0, "▁▁": 1, "▁a": 2, "b": 3}, unk_token="b"))
        backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
        choice = random.Random(1)
        for _ in range(50):
            ids = [choice.choice([0, 0, 1, 1, 2, 3]) for _ in range(60)]
            assert_equals_decoding_at_once(Tokenizer(backend, {}), ids, ("b  a",))


class TestCharacters:
    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            ("a👍🏽é".encode(), ["a", "", "", "", "👍", "", "", "", "🏽", "", "é", ""]),
            (b"a\xf0\x9f", ["a", "", "", "\ufffd"]),
            (b"\xff\xff\xffa", ["", "\ufffd", "\ufffd", "\ufffda", ""]),
        ],
        ids=["whole", "incomplete at the end", "broken, one token late"],
    )
    def test_come_when_they_are_certain(self, byte_level, content, parts):
        assert stream(byte_level, byte_ids(byte_level, content)) == (parts, None)

    def test_of_byte_fallback_wait_for_the_end_of_their_run(self, metaspace):
        fox = metaspace.encode("fox", add_special_tokens=False)
        good = byte_ids(metaspace, "🎉".encode())
        assert stream(metaspace, [*good, *fox])[0][:5] == ["", "", "", "", "🎉" + metaspace.decode([*good, fox[0]])[1:]]


class TestStopStrings:
    @pytest.mark.parametrize(
        ("text", "stops", "expected", "stopped"),
        [("one two", ("two",), "one ", "two"), ("abcd", ("bc", "abc"), "", "abc")],
    )
    def test_end_the_text(self, byte_level, text, stops, expected, stopped):
        for ids in (byte_level.encode(text), byte_ids(byte_level, text.encode())):
            parts, found = stream(byte_level, ids, stops)
            assert ("".join(parts), found) == (expected, stopped)

    def test_that_only_began_are_returned_at_once_when_they_fail(self, byte_level):
        parts, _ = stream(byte_level, byte_ids(byte_level, b"xENxEND"), ("END",))
        assert parts == ["x", "", "", "ENx", "", "", "", ""]

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_are_looked_for_in_what_comes_since_stopping(self, tokenizer, data):
        token = st.integers(0, tokenizer.vocab_size - 1)
        ids, later = data.draw(st.lists(token, max_size=20)), data.draw(st.lists(token, max_size=20))
        text = TextStream(tokenizer, ("a", "e ", "\ufffd"))
        before = "".join([text.push(token, stopping=False) for token in ids])
        plain = TextStream(tokenizer)
        assert before == "".join([plain.push(token) for token in ids]) and text.stopped is None
        after = "".join([*(text.push(token) for token in later), text.finish() if later else ""])
        rest = tokenizer.decode([*ids, *later])[len(before) :]
        assert not later or (after, text.stopped) == until_first_stop(rest, ("a", "e ", "\ufffd"))

    def test_that_began_before_stopping_are_text(self, byte_level):
        text = TextStream(byte_level, ("bc",))
        ids = byte_ids(byte_level, b"abcbcd")
        assert [text.push(token, stopping=index > 1) for index, token in enumerate(ids)] == ["a", "b", "c", "", "", ""]
        assert text.stopped == "bc"

    def test_held_back_are_returned_when_stopping_is_given_up(self, byte_level):
        text = TextStream(byte_level, ("abc",))
        a, b, c = byte_ids(byte_level, b"abc")
        assert [text.push(a), text.push(b), text.push(c, stopping=False), text.finish()] == ["", "", "abc", ""]
        assert text.stopped is None


@pytest.mark.parametrize("content", [b"a", b"\xff", "🎉".encode()], ids=["text", "broken", "emoji"])
def test_a_token_costs_the_same_late_as_early(byte_level, content):
    token = byte_ids(byte_level, content)[0]
    counting = Counting(byte_level)
    text = TextStream(counting, ("never",))  # type: ignore[arg-type]
    decoded = []
    for _ in range(20):
        before = counting.note_decoded
        for _ in range(150):
            text.push(token)
        decoded.append(counting.note_decoded - before)
    assert 150 <= decoded[-1] < LATE_TO_EARLY * decoded[0]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.note_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Sequence[int]) -> str:
        self.note_decoded += len(ids)
        return self._tokenizer.decode(ids)


def test_a_decoder_that_joins_no_bytes_is_not_taken_for_one(metaspace, monkeypatch):
    monkeypatch.setattr(metaspace, "joins_bytes", True)
    with pytest.raises(AssertionError):
        assert_equals_decoding_at_once(metaspace, metaspace.encode("two words, and a third"))
