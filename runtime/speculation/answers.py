"""Prompt lookup in answers to former requests of the same scope as well, which repeat a form or a template."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from llmc.runtime.speculation.drafters import LONGEST, REACH, SIZES, PromptLookup

MOST_TOKENS = 8192
"""Tokens of answers that a scope remembers, the last ones, in 32 KiB."""
MOST_SCOPES = 16
"""Scopes that are remembered, those used last."""
END = -1
"""Behind each answer: no token."""


class Answers:
    """The last answers of a scope, 8,192 tokens of them, searched without an index, which would take 100 times the
    memory."""

    def __init__(self) -> None:
        self._known = np.empty(0, np.int32)

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer; of one longer than a scope's memory its beginning."""
        new = np.array([*answer[: MOST_TOKENS - 1], END], np.int32)
        self._known = np.concatenate([self._known, new])[-MOST_TOKENS:].copy()

    def find(self, tokens: Sequence[int], longer_than: int) -> list[int]:
        """Tokens that followed the longest match of the end of ``tokens``, of equal ones the last, if it has more than
        so many; twice as much as matched."""
        known, matched = self._known, 1
        places = np.flatnonzero(known == tokens[-1])
        while len(places) and matched < min(LONGEST, len(tokens)):
            # Before the first answer is the end of the last one, which matches nothing.
            longer = places[known[places - matched] == tokens[-1 - matched]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if not len(places) or matched < SIZES[-1] or matched <= longer_than:
            return []
        followed: list[int] = known[places[-1] + 1 :][: REACH * matched].tolist()
        return followed[: followed.index(END)] if END in followed else followed


class AnswerLookup:
    """Prompt lookup for the sequences of one scope; where the scope's answers match longer, these.

    Nothing of one scope is ever proposed in another, nor to a sequence without one.
    """

    costs_by_token = False

    def __init__(self, lookup: PromptLookup, answers: Answers) -> None:
        self._lookup = lookup
        self.answers = answers

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        matched = self._lookup.find(key, tokens)[1]
        return self.answers.find(tokens, matched)[:count] or self._lookup.propose(key, tokens, count)

    def forget(self, key: int) -> None:
        self._lookup.forget(key)

    def close(self) -> None:
        """The lookup is closed by whoever made it."""


class Scopes:
    """The answers of an engine's scopes by their names, of those used last."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, Answers] = OrderedDict()

    def of(self, scope: str) -> Answers:
        """The scope's answers, none at first."""
        answers = self._answers.setdefault(scope, Answers())
        self._answers.move_to_end(scope)
        while len(self._answers) > MOST_SCOPES:
            self._answers.popitem(last=False)
        return answers
