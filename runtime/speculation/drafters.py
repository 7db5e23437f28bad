"""Drafters, which guess the next tokens: the protocol, and prompt lookup, which needs no second model."""

from collections.abc import Sequence
from typing import Protocol

from llmc.runtime.runner.model_runner import Watch

SIZES = range(4, 1, -1)
"""Tokens of a match, the most first; single tokens recur by chance all the time."""
CANDIDATES, LONGEST = 16, 32
"""Places with a match of the largest size that are compared, the last ones, and tokens up to which they are."""
REACH = 2
"""Tokens that are proposed at most for each token of the match: what agrees for long goes on to agree."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences. Not thread-safe: the engine's thread alone calls it."""

    costs_by_token: bool
    """True if more drafts take longer: then it is asked for as many as pay, otherwise for all there is room for."""

    watch: Watch | None
    """Takes the hidden states of every call; None: needs none."""

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens`` (prompt and generated so far); none if it has no idea.

        ``key`` names the sequence. From call to call its ``tokens`` only ever get longer.
        """

    def forget(self, key: int) -> None:
        """The sequence has ended; unknown keys are ignored."""

    def close(self) -> None:
        """Free everything."""


class PromptLookup:
    """Proposes what followed the last few tokens when they occurred before, in the prompt or in the output.

    The longest match counts, and of several the most recent. Where what is known to have followed ends, the text is
    taken to go on repeating itself. The index over n-grams takes roughly 150 bytes per token and n.

    Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; the bound by the length
    of the match is SuffixDecoding's, https://arxiv.org/abs/2411.04975.
    """

    costs_by_token = False
    watch: Watch | None = None

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = _Index()
        index.extend(tokens)
        start, matched = index.find(tokens)
        count = min(count, REACH * matched)
        drafts = list(tokens[start : start + count])
        for i in range(count - len(drafts)):  # beyond the end
            drafts.append(drafts[i])
        return drafts

    def forget(self, key: int) -> None:
        self._indices.pop(key, None)

    def close(self) -> None:
        self._indices.clear()


class _Index:
    """Positions at which each n-gram of a sequence last ended, and for the longest n-grams the earlier ones, too. The
    last n-gram, which nothing follows, is left out."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self._before: dict[int, int] = {}
        self._done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token."""
        assert len(tokens) >= self._done, "a sequence only gets longer"
        after = self.after
        for end in range(self._done + 1, len(tokens)):
            for size in SIZES:
                if size > end:
                    continue
                gram = tuple(tokens[end - size : end])
                if size == SIZES[0] and gram in after:
                    self._before[end] = after[gram]
                after[gram] = end
        self._done = max(self._done, len(tokens) - 1)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place behind the longest and last match of the end of ``tokens``; its length, 0 for none."""
        end = len(tokens)
        for size in SIZES:
            start = self.after.get(tuple(tokens[end - size : end])) if size <= end else None
            if start is not None:
                return self._longest(tokens, start) if size == SIZES[0] else (start, size)
        return 0, 0

    def _longest(self, tokens: Sequence[int], last: int) -> tuple[int, int]:
        best, matched, place = last, 0, last
        for _ in range(CANDIDATES):
            length = _common_end(tokens, place)
            if length > matched:
                best, matched = place, length
            if matched == LONGEST or place not in self._before:
                break
            place = self._before[place]
        return best, matched


def _common_end(tokens: Sequence[int], place: int) -> int:
    """Count the tokens before ``place`` that equal those at the end, up to the largest of :data:`SIZES` at least."""
    length, most, end = SIZES[0], min(place, LONGEST), len(tokens)
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
