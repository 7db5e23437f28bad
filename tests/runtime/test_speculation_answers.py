"""Prompt lookup in answers to former requests: found within a scope, bounded, and never outside of it."""

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.speculation.answers import END, MOST_SCOPES, MOST_TOKENS, AnswerLookup, Answers, Scopes
from llmc.runtime.speculation.drafters import LONGEST, REACH, PromptLookup

ANSWER = [*range(100, 130)]


def lookup(*answers: list[int]) -> AnswerLookup:
    known = Answers()
    for answer in answers:
        known.add(answer)
    return AnswerLookup(PromptLookup(), known)


def test_what_followed_in_an_answer_is_proposed_twice_as_long_as_the_match():
    assert lookup(ANSWER).propose(0, [1, 2, *ANSWER[:3]], 31) == ANSWER[3:9]
    assert lookup(ANSWER).propose(0, [1, 2, *ANSWER[:3]], 2) == ANSWER[3:5]
    assert lookup(ANSWER).propose(0, [1, 2, ANSWER[0]], 31) == []


def test_scopes_do_not_see_each_other():
    scopes = Scopes()
    scopes.of("a").add(ANSWER)
    assert AnswerLookup(PromptLookup(), scopes.of("a")).propose(0, [1, *ANSWER[:3]], 3) == ANSWER[3:6]
    assert AnswerLookup(PromptLookup(), scopes.of("b")).propose(0, [1, *ANSWER[:3]], 3) == []


def test_the_scopes_used_last_are_remembered():
    scopes = Scopes()
    first, second = scopes.of("first"), scopes.of("second")
    for i in range(MOST_SCOPES - 1):
        scopes.of("first")
        scopes.of(str(i))
    assert scopes.of("first") is first
    assert scopes.of("second") is not second


def test_memory_is_bounded_and_the_last_answers_are_kept():
    known = Answers()
    lengths = (300, 5, 9000, 4096, 700, 1)
    for i in range(200):
        known.add([i * 10 + j % 7 for j in range(lengths[i % len(lengths)])])
        assert len(known._known) <= MOST_TOKENS
        assert known._known.base is None, "what was dropped is kept by a view"
    known.add(ANSWER)
    for i in range(20):
        known.add([5000 + 500 * i + j for j in range(400)])
    assert known.find([1, *ANSWER[:3]], 0) == ANSWER[3:9]
    known.add([90_000 + j for j in range(400)])
    assert known.find([1, *ANSWER[:3]], 0) == []
    assert END < 0  # no token of any answer


@given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=6), st.lists(st.integers(0, 2), min_size=1))
def test_the_longest_match_is_that_of_a_search_place_by_place(answers: list[list[int]], tokens: list[int]):
    known, best, follows = Answers(), 1, list[int]()
    for answer in answers:
        known.add(answer)
        for place in range(1, len(answer) + 1):
            same = [a == b for a, b in zip(reversed(answer[:place]), reversed(tokens), strict=False)]
            length = min([*same, False].index(False), LONGEST)
            if length >= max(best, 2):
                best, follows = length, answer[place : place + REACH * length]
    assert known.find(tokens, 0) == follows
    assert known.find(tokens, best) == []
