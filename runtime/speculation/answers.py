"""Prompt lookup in answers to former requests of the same scope as well, which repeat a form or a template."""

from collections import OrderedDict
from collections.abc import Sequence

from llmc.runtime.speculation.drafters import REACH, Index, PromptLookup

MOST_TOKENS = 4096
"""Tokens of answers after which a scope begins anew; those before are kept until as many have come again."""
MOST_SCOPES = 16
"""Scopes that are remembered, those used last: at some 450 bytes for a token about 60 MB in all."""
END = -1
"""Between two answers: no token."""


class Answers:
    """The answers of a scope, the last 4,096 to 8,192 tokens of them, and what followed what in them."""

    def __init__(self) -> None:
        self._young, self._old = _Answers(), _Answers()

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer; of one longer than a scope's memory its beginning."""
        if len(self._young.tokens) + len(answer) >= MOST_TOKENS:
            self._young, self._old = _Answers(), self._young
        self._young.add(answer[: MOST_TOKENS - 1])

    def find(self, tokens: Sequence[int], longer_than: int) -> list[int]:
        """Tokens after the longest match of the end of ``tokens``, of more than so many; twice as much as matched."""
        best: list[int] = []
        for part in (self._young, self._old):
            start, matched = part.index.find(part.tokens, tokens)
            if matched > longer_than:
                followed = part.tokens[start : start + REACH * matched]
                best, longer_than = followed[: followed.index(END)] if END in followed else followed, matched
        return best


class _Answers:
    """Answers one behind the other, and their index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.index = Index()

    def add(self, answer: Sequence[int]) -> None:
        self.tokens += [*answer, END]
        self.index.extend(self.tokens)


class AnswerLookup:
    """A drafter for the sequences of one scope: prompt lookup, and where the scope's answers match longer, these.

    Nothing of one scope is ever proposed in another, nor to a sequence without one, so how many drafts come true tells
    of answers of the scope alone.

    Args:
        lookup: in the sequence's own tokens.
        answers: of the scope.
    """

    costs_by_token = False

    def __init__(self, lookup: PromptLookup, answers: Answers) -> None:
        self._lookup = lookup
        self.answers = answers

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest suffix of ``tokens`` that occurred before."""
        matched = self._lookup.find(key, tokens)[1]
        return self.answers.find(tokens, matched)[:count] or self._lookup.propose(key, tokens, count)

    def forget(self, key: int) -> None:
        """Drop the sequence's own index."""
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
