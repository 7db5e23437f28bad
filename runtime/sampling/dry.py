"""DRY: "don't repeat yourself", a penalty for continuing a sequence that occurred before.

First described and implemented in https://github.com/oobabooga/text-generation-webui/pull/5677. If the last L tokens
occurred before and were followed by token t, then t loses ``multiplier * base ** (L - allowed_length)``, for the
longest such L of at least ``allowed_length``.

A sequence breaker is a text that ends a repetition, however it is tokenized: inside one token, across several tokens,
or finished by the beginning of a token. A token that contains a whole breaker is never punished. (llama.cpp, which has
only ids, recognises a text over several tokens if those after the first are as its tokenizer would write them.)
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.penalties import Follower

# A penalty this large forbids a token, and float32 still divides it by any sensible temperature.
_LARGEST = 1e9
_LONGEST = 2**31  # no sequence is longer, and its double fits int64


class Breakers:
    """Non-empty texts that end a repetition; ``spelling`` gives a token's bytes. Samples may share one object."""

    def __init__(self, texts: Sequence[str] = (), spelling: Callable[[int], bytes] = lambda token: b"") -> None:
        self._texts = tuple({text.encode("utf-8", "surrogatepass"): None for text in texts})
        self._carried = max(map(len, self._texts), default=1) - 1
        self._spelling = spelling
        self._spellings: dict[int, bytes] = {}
        self._containing: dict[int, bool] = {}

    def __contains__(self, token: int) -> bool:
        if token not in self._containing:
            spelling = self._get_spelling(token)
            self._containing[token] = any(text in spelling for text in self._texts)
        return self._containing[token]

    def find_last(self, before: bytes, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Number of ``tokens`` up to the end of the last breaker, 0 if there is none; and the end of the text so far,
        to pass as ``before`` with the next tokens."""
        if not self._texts:
            return 0, b""
        spellings = [self._get_spelling(token) for token in tokens]
        text = b"".join([before, *spellings])
        end = max(place + len(breaker) if (place := text.rfind(breaker)) >= 0 else 0 for breaker in self._texts)
        count, reached = 0, len(before)
        while reached < end:
            reached += len(spellings[count])
            count += 1
        return count, text[max(0, len(text) - self._carried) :]

    def _get_spelling(self, token: int) -> bytes:
        if token not in self._spellings:
            self._spellings[token] = self._spelling(token)
        return self._spellings[token]


class Dry(Follower):
    """The penalty for one sequence; a step costs one vectorised comparison over the tokens looked back at.

    Args:
        multiplier: penalty of a repetition of ``allowed_length`` tokens, above 0.
        base: growth of the penalty with every further token, from 1.
        allowed_length: repetitions shorter than this go free.
        window: last tokens looked back at; 0 is all.
        breakers: texts that end a repetition; None for none.
    """

    def __init__(
        self,
        multiplier: float,
        base: float = 1.75,
        allowed_length: int = 2,
        window: int = 0,
        breakers: Breakers | None = None,
        branching: bool = False,
    ) -> None:
        super().__init__(branching=branching)
        self._multiplier, self._base = multiplier, base
        self._allowed = min(allowed_length, _LONGEST)
        self._window = window
        self._breakers = breakers or Breakers()
        self._longest = self._longest_that_counts()
        self._ids = np.zeros(0, np.int64)
        self._spared = np.zeros(0, np.bool_)  # tokens that contain a breaker
        self.restart()

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        self.follow(tokens)
        first = max(0, self._size - self._window) if self._window else 0
        ids = self._ids[first : self._size]
        if ids.size < 2 or self._broken == self._size:
            return logits
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a repetition may end
        lengths = self._lengths(ids, ends)
        followers = ids[ends + 1]
        punished = (lengths >= self._allowed) & ~self._spared[first + ends + 1]
        order = np.argsort(lengths[punished], kind="stable")  # the last penalty assigned to a token stays
        targets = followers[punished][order]
        logits[targets] -= self._penalties(lengths[punished][order])
        return logits

    def restart(self) -> None:
        self._size = self._broken = 0  # number of tokens; number up to the end of the last breaker
        self._text = b""  # the end of the text so far, where a breaker may have begun

    def extend(self, tokens: Sequence[int], start: int) -> None:
        if len(tokens) > self._ids.size:
            more = 2 * len(tokens) - self._size
            self._ids = np.concatenate([self._ids[: self._size], np.zeros(more, np.int64)])
            self._spared = np.concatenate([self._spared[: self._size], np.zeros(more, np.bool_)])
        self._ids[start : len(tokens)] = tokens[start:]
        self._spared[start : len(tokens)] = [token in self._breakers for token in tokens[start:]]
        self._size = len(tokens)
        count, self._text = self._breakers.find_last(self._text, tokens[start:])
        if count:
            self._broken = start + count

    def _lengths(self, ids: npt.NDArray[np.int64], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Numbers of tokens up to each of ``ends`` that equal the last tokens, counted up to ``_longest``."""
        lengths = np.ones(ends.size, np.int64)
        alive = np.arange(ends.size)
        for length in range(1, min(self._longest, ids.size - 1, self._size - self._broken)):
            previous = int(ids[-1 - length])
            alive = alive[ends[alive] >= length]
            alive = alive[ids[ends[alive] - length] == previous]
            if alive.size == 0:
                break
            lengths[alive] += 1
        return lengths

    def _longest_that_counts(self) -> int:
        """The length from which the penalty no longer grows."""
        if self._base == 1 or self._multiplier >= _LARGEST:
            return self._allowed
        growth = math.log(_LARGEST / self._multiplier) / math.log(self._base)
        return self._allowed + math.ceil(min(growth, _LONGEST))

    def _penalties(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            powers = self._multiplier * self._base ** (lengths - self._allowed).astype(np.float64)
        return np.minimum(powers, _LARGEST).astype(np.float32)
