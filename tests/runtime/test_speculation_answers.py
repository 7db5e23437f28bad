"""Prompt lookup in answers to former requests: found within a scope, bounded, and never outside of it."""

from llmc.runtime.speculation import answers as module
from llmc.runtime.speculation.answers import MOST_SCOPES, MOST_TOKENS, AnswerLookup, Answers, Scopes
from llmc.runtime.speculation.drafters import PromptLookup

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


def test_nothing_is_proposed_beyond_the_end_of_an_answer():
    assert lookup(ANSWER, [7, 8, 9]).propose(0, [1, *ANSWER[-6:-1]], 31) == [ANSWER[-1]]
    assert lookup(ANSWER, [7, 8, 9]).propose(0, [1, *ANSWER[-6:]], 31) == []
    assert lookup(ANSWER, [7, 8, 9]).propose(0, [1, ANSWER[-1], 7], 31) == []  # no match across two of them


def test_of_equal_matches_the_own_text_counts_and_otherwise_the_longest():
    own = [*ANSWER[:3], 55, 56, 57]
    assert lookup(ANSWER).propose(0, [*own, *ANSWER[:3]], 3) == [55, 56, 57]
    assert lookup([9, *ANSWER]).propose(0, [*own, 9, *ANSWER[:3]], 3) == ANSWER[3:6]
    assert lookup(ANSWER, [*ANSWER[:3], 60, 61]).propose(0, [1, *ANSWER[:3]], 2) == [60, 61]  # the last of equal ones


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
        parts = known._young, known._old
        assert all(len(part.tokens) <= MOST_TOKENS for part in parts)
        assert all(len(part.index.after) <= 3 * MOST_TOKENS for part in parts)
    known.add(ANSWER)
    for i in range(10):
        known.add([5000 + 500 * i + j for j in range(400)])
    assert known.find([1, *ANSWER[:3]], 0) == ANSWER[3:9]
    for i in range(20):
        known.add([90_000 + 500 * i + j for j in range(400)])
    assert known.find([1, *ANSWER[:3]], 0) == []
    assert module.END < 0  # no token of any answer
