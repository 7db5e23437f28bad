"""Drafters, which guess the next tokens: the protocol, and prompt lookup, which needs no second model."""

from collections.abc import Sequence
from typing import Protocol

SIZES = range(4, 1, -1)
"""Tokens of a match, the most first; single tokens recur by chance all the time."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences. Not thread-safe: the engine's thread alone calls it."""

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

    The longest match counts, and of several the most recent. What is proposed never goes beyond what is known to have
    followed. An index over n-grams grows with the sequence, so a step costs the same however long it is. The index
    takes roughly 150 bytes per token and n.

    Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; the same as
    transformers' ``prompt_lookup_num_tokens``, which takes the first match instead of the most recent.
    """

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, key: int, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest suffix of ``tokens`` that occurred before."""
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = _Index()
        index.extend(tokens)
        end = len(tokens)
        for size in SIZES:
            start = index.after.get(tuple(tokens[end - size : end])) if size <= end else None
            if start is not None:
                return list(tokens[start : start + count])
        return []

    def forget(self, key: int) -> None:
        """Drop the sequence's index."""
        self._indices.pop(key, None)

    def close(self) -> None:
        """Drop all indices."""
        self._indices.clear()


class _Index:
    """The last end of each n-gram of one sequence, of those that something follows."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self._done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token."""
        assert len(tokens) >= self._done, "a sequence only gets longer"
        after = self.after
        for end in range(self._done + 1, len(tokens)):
            for size in SIZES:
                if size <= end:
                    after[tuple(tokens[end - size : end])] = end
        self._done = max(self._done, len(tokens) - 1)
