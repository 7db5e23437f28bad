"""Unnormalised probabilities of a vocabulary, and the small arithmetic around them."""

import math

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import pick

Logits = npt.NDArray[np.float32]


def inverse(temperature: float) -> float:
    """1 / temperature, within what float32 can multiply differences of logits by without making NaN."""
    return min(max(1.0 / temperature, 1e-30), 1e30)


def check_peak(peak: float) -> None:
    """Refuse logits whose largest (NaN counts as the largest) is ``peak``, if it is not finite.

    Raises:
        RequestError: with what the logits hold.
    """
    if not math.isfinite(peak):
        what = "hold NaN" if math.isnan(peak) else "hold +inf" if peak > 0 else "are all -inf"
        raise RequestError(
            f"the model's logits {what}, so no token can be chosen; check the bundle with: llmc verify BUNDLE"
        )


def largest(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """Possible tokens whose logit is at least the k-th largest, by id."""
    rows = max(1, min(128, logits.size // (2 * k)))
    columns = logits.size // rows
    blocked = logits[: rows * columns].reshape(rows, columns)  # block c: tokens c, c + columns, ...
    maxima = np.concatenate([np.maximum.reduce(blocked, axis=0), logits[rows * columns :]])
    check_peak(float(maxima.max()))
    # Where many tokens are impossible, they are no candidates: selecting among that many equals takes 30 ms.
    maxima = maxima.compress(maxima > -np.inf)
    bound = np.partition(maxima, maxima.size - k)[maxima.size - k] if maxima.size >= k else -np.inf
    candidates: npt.NDArray[np.intp] = np.flatnonzero(logits >= bound if bound > -np.inf else logits > bound)
    if candidates.size <= k:
        return candidates
    values = logits[candidates]
    smallest = np.partition(values, values.size - k)[values.size - k]
    return np.compress(values >= smallest, candidates)


def most_probable(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """The ``k`` most probable tokens, most probable first, of equals the lowest id; impossible ones never."""
    candidates = largest(logits, k)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:k]]


def suffice(logits: Logits, needs: int) -> bool:
    """True if ``logits`` [V], with -inf wherever a session left one out, hold the ``needs`` largest and all their
    equals.

    What was left out is no larger than the least of those that are there. So it is enough that the last of the needed
    ones is larger than that; where both are equal, one more of the same size may have been left out. NaN is never
    enough, so that whoever sees all logits says what they hold.
    """
    if logits.min() > -np.inf:  # nothing was left out
        return True
    there = logits.take(np.flatnonzero(logits != -np.inf))
    if there.size <= needs:
        return False
    last = np.partition(there, there.size - needs)[there.size - needs]
    return bool(last > there.min())


def _fast_exponential() -> tuple[np.ufunc, float]:
    """The faster of exp and exp2 in float32, and the natural logarithm of its base.

    On AVX-512, numpy's exp2 takes half the time of its exp; elsewhere exp2 is a scalar loop.
    """
    if hasattr(np.lib, "introspect"):
        found = np.lib.introspect.opt_func_info(func_name="^exp2$", signature="float32")
        if found and not any(loop["current"].startswith("baseline") for loop in found["exp2"].values()):
            return np.exp2, math.log(2.0)
    return np.exp, 1.0


EXPONENTIAL, LOG_BASE = _fast_exponential()


class Masses:
    """Unnormalised probabilities of a vocabulary, with the sums that make drawing and removing cheap.

    Tokens lie in a grid [slabs, rows, columns], in which sums add up whole rows, fast. A draw first finds a column,
    that is all tokens some multiple of ``columns`` apart, then a place in it. Slabs let a removal stop early. The last
    places of the grid are padding and stay 0.
    """

    _SLABS, _ROWS = 8, 32
    _AT_ONCE = 2  # slabs: 150 kB of a large vocabulary, which stay in the second-level cache from one pass to the next
    _EXPONENTIAL, _LOG_BASE = EXPONENTIAL, LOG_BASE
    # Weights need no common factor if their total lies between these: float32 then holds all that matters.
    _TOTALS = (2.0**-60, 2.0**120)
    # Natural logarithms outside of which vector exponentials fall back to slow code, or overflow.
    _LOGARITHMS = (-87.0, 83.0)

    def __init__(self, vocab_size: int) -> None:
        columns = -(-vocab_size // (self._SLABS * self._ROWS))
        self._columns = max(1, -(-columns // 16)) * 16  # whole vectors in every row sum a third faster
        self._grid = np.zeros((self._SLABS, self._ROWS, self._columns), np.float32)
        self._by_column = self._grid.reshape(-1, self._columns)
        self._flat = self._grid.reshape(-1)[:vocab_size]
        slab = self._ROWS * self._columns
        self._pieces = [slice(start, start + self._AT_ONCE) for start in range(0, self._SLABS, self._AT_ONCE)]
        self._tokens = [slice(piece.start * slab, piece.stop * slab) for piece in self._pieces]  # of each piece
        self._sums = np.zeros((self._SLABS, self._columns), np.float32)
        self._above = np.zeros((self._ROWS, self._columns), np.bool_)
        self._cumulative = np.zeros(self._columns, np.float64)

    @property
    def total(self) -> float:
        return float(self._cumulative[-1])

    def peak(self) -> float:
        return float(self._flat.max())

    def fill(self, logits: Logits, temperature: float) -> None:
        """Set every weight to exp(logit / temperature), times a common factor where float32 needs one.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """
        scale = inverse(temperature)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._look_moderate(logits, scale):
                factor = np.float32(scale / self._LOG_BASE)
                for piece, tokens in zip(self._pieces, self._tokens, strict=True):
                    weights = self._flat[tokens]
                    np.multiply(logits[tokens], factor, out=weights)
                    self._EXPONENTIAL(weights, out=weights)
                    np.add.reduce(self._grid[piece], axis=1, out=self._sums[piece])
                self._accumulate()
                if self._TOTALS[0] < self.total < self._TOTALS[1]:
                    return
            peak = logits.max()
            check_peak(float(peak))
            np.subtract(logits, peak, out=self._flat)
            np.multiply(self._flat, np.float32(scale), out=self._flat)
            np.exp(self._flat, out=self._flat)
            self._sum()

    def _look_moderate(self, logits: Logits, scale: float) -> bool:
        """Guess cheaply whether no common factor is needed; a wrong guess costs time and nothing else."""
        lowest, highest = self._LOGARITHMS
        if not float(logits[::61].min()) * scale > lowest:
            return False
        return scale < 2.0 or float(logits.max()) * scale < highest

    def pick(self, first: float, second: float) -> tuple[int, np.float32]:
        """A token drawn in proportion to its weight, and the weight; two uniform numbers find its column and row."""
        column = pick(self._cumulative, first)
        row = pick(np.add.accumulate(self._by_column[:, column], dtype=np.float64), second)
        token = row * self._columns + column
        return token, self._flat[token]

    def remove(self, pivot: np.float32, enough: float) -> float:
        """Set weights up to ``pivot`` to 0 and return their mass, stopping halfway once it exceeds ``enough``."""
        removed = 0.0
        for weights, sums in zip(self._grid, self._sums, strict=True):
            before = float(np.add.reduce(sums))
            np.greater(weights, pivot, out=self._above)
            np.multiply(weights, self._above, out=weights)
            np.add.reduce(weights, axis=0, out=sums)
            removed += before - float(np.add.reduce(sums))
            if removed > enough:
                return removed
        self._accumulate()
        return removed

    def _sum(self) -> None:
        np.add.reduce(self._grid, axis=1, out=self._sums)
        self._accumulate()

    def _accumulate(self) -> None:
        np.add.accumulate(np.add.reduce(self._sums, axis=0), dtype=np.float64, out=self._cumulative)
