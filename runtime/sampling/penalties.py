"""Penalties for tokens that occurred before, kept up to date as the sequence grows.

A step costs as much as its new tokens, however long the sequence is, plus one pass over its distinct tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits

_FIRST_SIZE = 256


class Follower(ABC):
    """Base of processors that read each token of a growing sequence once, starting at position ``start``.

    With ``branching``, successive calls may be for different sequences, such as beams: every call compares all tokens
    read so far. Otherwise it compares only the last one; the caller promises that sequences only grow at the end.
    """

    def __init__(self, start: int = 0, branching: bool = False) -> None:
        self._start = start
        self._branching = branching
        self._read = start
        self._seen: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Read the new tokens of ``tokens``; start over if they do not continue the last call's."""
        if not self._goes_on(tokens):
            self.restart()
            self._read = self._start
        if len(tokens) > self._read:
            self.extend(tokens, self._read)
            self._read = len(tokens)
            self._seen = list(tokens) if self._branching else [tokens[-1]]

    @abstractmethod
    def restart(self) -> None:
        """Forget everything."""

    @abstractmethod
    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Read ``tokens[start:]``."""

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        if self._read == self._start:
            return True
        if len(tokens) < self._read:
            return False
        known = tokens[: self._read] if self._branching else tokens[self._read - 1 : self._read]
        return list(known) == self._seen


class TokenCounts(Follower):
    """The distinct tokens from a position on, and how often each occurred."""

    def __init__(self, start: int = 0, branching: bool = False) -> None:
        super().__init__(start, branching)
        self.restart()

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, in the order of their first occurrence [n]."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences of :attr:`tokens` [n]."""
        return self._counts[: len(self._places)]

    def restart(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(_FIRST_SIZE, np.int64)
        self._counts = np.zeros(_FIRST_SIZE, np.float32)

    def extend(self, tokens: Sequence[int], start: int) -> None:
        for token in tokens[start:]:
            index = self._places.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1

    def _add(self, token: int) -> int:
        index = self._places[token] = len(self._places)
        if index == self._tokens.size:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[index] = token
        return index


class RepetitionPenalty:
    """Divides the positive logits, and multiplies the negative ones, of every token in prompt and output.

    Keskar et al., CTRL, https://arxiv.org/abs/1909.05858, with the case of negative logits as in transformers.
    """

    def __init__(self, penalty: float, branching: bool = False) -> None:
        self._penalty = np.float32(penalty)
        self._seen = TokenCounts(branching=branching)

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        self._seen.follow(tokens)
        values = logits[self._seen.tokens]
        logits[self._seen.tokens] = np.where(values < 0, values * self._penalty, values / self._penalty)
        return logits


class OutputPenalty:
    """Subtracts ``presence + frequency * occurrences`` from the logit of every token in the output (not the prompt).

    https://platform.openai.com/docs/api-reference/chat/create
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int, branching: bool = False) -> None:
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)
        self._seen = TokenCounts(prompt_length, branching)

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        self._seen.follow(tokens)
        logits[self._seen.tokens] -= self._presence + self._frequency * self._seen.counts
        return logits


class BadWords:
    """Forbids the last token of a sequence if the tokens before it are the last ones of prompt and output.

    Equals transformers' ``bad_words_ids``. A step looks only at sequences whose last token but one is the text's last
    token, and at single tokens.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        self._lengths: dict[int, set[int]] = {}  # lengths of the tokens before the last, by the token they end with
        for *before, last in sequences:
            self._last.setdefault(tuple(before), []).append(last)
            if before:
                self._lengths.setdefault(before[-1], set()).add(len(before))

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        for length in (0, *(self._lengths.get(tokens[-1], ()) if tokens else ())):
            if length <= len(tokens):
                logits[self._last.get(tuple(tokens[len(tokens) - length :]), [])] = -np.inf
        return logits


class NoRepeatNGram(Follower):
    """Forbids every token that would make an n-gram of prompt and output occur twice, as transformers does."""

    def __init__(self, size: int, branching: bool = False) -> None:
        super().__init__(branching=branching)
        self._size = size
        self.restart()

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        self.follow(tokens)
        first = len(tokens) - self._size + 1
        if first >= 0:
            logits[self._next.get(tuple(tokens[first:]), [])] = -np.inf
        return logits

    def restart(self) -> None:
        self._next: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int], start: int) -> None:
        for last in range(max(start, self._size - 1), len(tokens)):
            head = tuple(tokens[last - self._size + 1 : last])
            self._next.setdefault(head, []).append(tokens[last])
