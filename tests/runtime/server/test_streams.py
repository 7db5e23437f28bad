"""Chunks of a stream: JSON that is put together from parts is the JSON of the whole."""

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.server.streams import Chunks, encoded

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # halves of characters cannot be sent at all
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
HEADS = st.dictionaries(st.sampled_from(["id", "object", "created", 'a"}']), VALUES, min_size=1)
RESTS = st.dictionaries(st.sampled_from(["choices", "usage", "x_llmc"]), VALUES, min_size=1)


@given(HEADS, RESTS)
def test_a_chunk_is_the_json_of_its_head_and_the_rest(head: dict[str, Any], rest: dict[str, Any]):
    chunk = Chunks(head)(**rest)
    assert chunk == encoded({**head, **rest})
    assert json.loads(chunk) == {**head, **rest}
    assert "\n" not in chunk  # which would end the event


def test_one_head_begins_all_chunks_of_a_stream():
    chunks = Chunks({"id": "a", "created": 1})
    assert [chunks(choices=[]), chunks(choices=["}{"], usage=None)] == [
        '{"id":"a","created":1,"choices":[]}',
        '{"id":"a","created":1,"choices":["}{"],"usage":null}',
    ]


@given(HEADS, TEXTS, TEXTS)
def test_chunks_that_differ_in_a_text_alone_are_those_of_the_whole(head: dict[str, Any], first: str, second: str):
    chunks = Chunks(head)
    of_text = chunks.of_texts(lambda text: {"choices": [{"delta": {"content": text}, "index": 0}], "usage": None})
    for text in (first, second):
        assert of_text(text) == chunks(choices=[{"delta": {"content": text}, "index": 0}], usage=None)


def test_what_json_does_not_know_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        Chunks({"id": "a"})(logprob=float("nan"))
