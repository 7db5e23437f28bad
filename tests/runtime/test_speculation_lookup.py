"""Prompt lookup against a search of the whole text, written the plain way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.speculation import drafters
from llmc.runtime.speculation.drafters import CANDIDATES, LONGEST, REACH, SIZES, PromptLookup

# Few tokens, so that they recur.
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60) | st.lists(st.integers(0, 1), min_size=1, max_size=200)


def searched(tokens: list[int], count: int) -> list[int]:
    """The tokens behind the longest match, found by looking everywhere; of equal ones behind the last."""
    ends = range(len(tokens) - 1, 0, -1)
    lengths = {end: next(n for n in range(LONGEST, -1, -1) if n <= end and matches(tokens, end, n)) for end in ends}
    compared = [end for end in ends if lengths[end] >= SIZES[0]][:CANDIDATES]
    matched, end = max(((min(lengths[end], LONGEST), end) for end in compared or ends), default=(0, 0))
    if matched < SIZES[-1]:
        return []
    longer = [*tokens]
    for i in range(min(count, REACH * matched)):
        longer.append(longer[end + i])
    return longer[len(tokens) :]


def matches(tokens: list[int], end: int, length: int) -> bool:
    return tokens[end - length : end] == tokens[len(tokens) - length :]


@given(TEXTS, st.integers(1, 200), st.integers(0, 40))
def test_it_proposes_what_a_search_of_the_whole_text_finds(text, prompt, count):
    lookup = PromptLookup()
    for length in range(min(prompt, len(text)), len(text) + 1):
        tokens = text[:length]
        assert lookup.propose(7, tokens, count) == searched(tokens, count)


@given(TEXTS, st.lists(st.integers(1, 9), min_size=1))
def test_it_may_be_asked_after_any_number_of_new_tokens(text, jumps):
    lookup, length = PromptLookup(), 1
    for jump in jumps:
        length = min(length + jump, len(text))
        assert lookup.propose(0, text[:length], 5) == searched(text[:length], 5)


def test_the_longest_match_counts_and_of_those_the_last(monkeypatch):
    text = [1, 2, 3, 40, 1, 2, 3, 41, 9, 2, 3, 42, 1, 2, 3]
    assert PromptLookup().propose(0, text, 2) == [41, 9]
    monkeypatch.setattr(drafters, "SIZES", range(2, 1, -1))
    monkeypatch.setattr(drafters, "CANDIDATES", 1)
    assert PromptLookup().propose(0, text, 2) == [42, 1]  # planted: a shorter match finds something else


def test_among_long_matches_the_longest_counts(monkeypatch):
    text = [9, 1, 2, 3, 4, 40, 8, 1, 2, 3, 4, 41, 9, 1, 2, 3, 4]
    assert PromptLookup().propose(0, text, 1) == [40]
    monkeypatch.setattr(drafters, "CANDIDATES", 1)
    assert PromptLookup().propose(0, text, 1) == [41]  # planted: only the last one is looked at


@pytest.mark.threat("lookup-privacy")
def test_sequences_do_not_see_each_other_and_are_forgotten():
    lookup = PromptLookup()
    assert lookup.propose(1, [1, 2, 3, 1, 2], 1) == [3]
    assert lookup.propose(2, [1, 2], 1) == []
    lookup.forget(1)
    lookup.forget(1)
    assert lookup.propose(1, [1, 2], 1) == []
    assert lookup.propose(1, [1, 2, 8, 1, 2], 1) == [8]
    lookup.close()
    assert lookup.propose(1, [1, 2], 1) == []
