"""The most probable tokens of a position; the other logits stay on the GPU until a request needs them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits, weigh
from llmc.runtime.sampling.truncation import ACCURACY, Candidates, Rest, UndecidedError


@dataclass(frozen=True)
class Ranked:
    """One position's most probable tokens; the next call may overwrite them.

    A choice made from them equals the choice from the whole row; otherwise :class:`UndecidedError` is raised.
    """

    ids: npt.NDArray[np.int64]  # of the most probable tokens [K]; ties are in any order
    values: Logits  # their logits [K], the largest first
    total: float  # sum of exp(logit - largest) over the vocabulary, to about 1e-6 of itself
    vocab_size: int  # tokens in all
    whole: Callable[[], Logits]  # copies the logits of all tokens [V] from the GPU

    def copy(self) -> Logits:
        row: Logits = self.whole().copy()
        return row

    def best(self) -> int:
        """The most probable token, ties by lowest id."""
        peak = self._peak()
        if len(self.ids) < self.vocab_size and peak == self.values.min():
            raise UndecidedError
        return int(self.ids[self.values == peak].min())

    def candidates(self) -> Candidates:
        """The tokens by id, and bounds on the rest."""
        self._peak()
        order = self.ids.argsort()
        values = self.values[order]
        if len(order) == self.vocab_size:
            return Candidates(self.ids[order], values)
        beyond, slack = self.total - float(weigh(values).sum(dtype=np.float64)), ACCURACY * self.total
        rest = Rest(values.min(), self.vocab_size - len(order), max(0.0, beyond - slack), max(0.0, beyond) + slack)
        return Candidates(self.ids[order], values, rest)

    def log_total(self) -> float:
        """The logarithm of the sum of exp(logit)."""
        return float(self._peak()) + math.log(self.total)

    def _peak(self) -> np.float32:
        """The largest logit; non-finite logits make the total or the first value infinite or NaN."""
        peak: np.float32 = self.values.max()
        if self.values[0] != peak or not math.isfinite(self.total):
            raise UndecidedError
        return peak
