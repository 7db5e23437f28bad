"""DRY: "don't repeat yourself", a penalty for going on with a sequence that occurred before.

As first described and implemented in https://github.com/oobabooga/text-generation-webui/pull/5677. If the last L tokens
occurred before and were followed by token t, then t loses ``multiplier * base ** (L - allowed_length)``, for the
longest such L of at least ``allowed_length``. No repetition reaches across a sequence breaker, and a breaker itself is
never punished.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.masses import Logits
from llmc.runtime.sampling.penalties import Follower

# A penalty forbids long before it reaches this, and float32 still divides it by any sensible temperature.
_LARGEST = 1e9
_LONGEST = 2**31  # no sequence is longer, and its double fits int64


class Dry(Follower):
    """The penalty for one sequence; a step costs one vectorised comparison over the tokens looked back at.

    Args:
        multiplier: penalty of a repetition of ``allowed_length`` tokens, above 0.
        base: growth of the penalty with every further token, from 1.
        allowed_length: repetitions shorter than this go free.
        window: last tokens looked back at; 0 is all.
        breakers: ids of sequence breakers.
        branching: see :class:`Follower`.
    """

    def __init__(
        self,
        multiplier: float,
        base: float = 1.75,
        allowed_length: int = 2,
        window: int = 0,
        breakers: Collection[int] = (),
        branching: bool = False,
    ) -> None:
        super().__init__(branching=branching)
        self._multiplier, self._base = multiplier, base
        self._allowed = min(allowed_length, _LONGEST)
        self._window = window
        self._breakers = frozenset(breakers)
        self._breaker_ids = np.array(sorted(self._breakers), np.int64)
        self._longest = self._longest_that_counts()
        self._ids = np.zeros(0, np.int64)
        self._size = 0

    def __call__(self, tokens: Sequence[int], logits: Logits) -> Logits:
        self.follow(tokens)
        ids = self._ids[max(0, self._size - self._window) if self._window else 0 : self._size]
        if ids.size < 2 or int(ids[-1]) in self._breakers:
            return logits
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a repetition may end
        lengths = self._lengths(ids, ends)
        followers = ids[ends + 1]
        punished = (lengths >= self._allowed) & ~np.isin(followers, self._breaker_ids)
        order = np.argsort(lengths[punished], kind="stable")  # of one token's penalties, the last one assigned stays
        targets = followers[punished][order]
        logits[targets] -= self._penalties(lengths[punished][order])
        return logits

    def restart(self) -> None:
        """Forget all tokens."""
        self._size = 0

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Append ``tokens[start:]``."""
        if len(tokens) > self._ids.size:
            self._ids = np.concatenate([self._ids[: self._size], np.zeros(2 * len(tokens) - self._size, np.int64)])
        self._ids[start : len(tokens)] = tokens[start:]
        self._size = len(tokens)

    def _lengths(self, ids: npt.NDArray[np.int64], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Numbers of tokens up to each of ``ends`` that equal the last tokens, counted no further than matters."""
        lengths = np.ones(ends.size, np.int64)
        alive = np.arange(ends.size)
        for length in range(1, min(self._longest, ids.size - 1)):
            previous = int(ids[-1 - length])
            alive = alive[ends[alive] >= length]
            alive = alive[ids[ends[alive] - length] == previous]
            if alive.size == 0 or previous in self._breakers:
                break
            lengths[alive] += 1
        return lengths

    def _longest_that_counts(self) -> int:
        """The length from which on the penalty does not grow any more."""
        if self._base == 1 or self._multiplier >= _LARGEST:
            return self._allowed
        growth = math.log(_LARGEST / self._multiplier) / math.log(self._base)
        return self._allowed + math.ceil(min(growth, _LONGEST))

    def _penalties(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            powers = self._multiplier * self._base ** (lengths - self._allowed).astype(np.float64)
        return np.minimum(powers, _LARGEST).astype(np.float32)
