"""Counts by bucket, and the quantiles that they allow to estimate."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from llmc.errors import UsageError


@dataclass(frozen=True)
class HistogramSnapshot:
    """Counts of observations by bucket, at one moment.

    Attributes:
        bounds: upper bounds of the buckets, included, ascending; one more bucket above the last is open.
        counts: observations in each bucket, ``len(bounds) + 1`` of them, not accumulated.
        sum: of all observations.
        max: largest observation, 0 where there is none.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    max: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None where there is none."""
        return self.sum / self.count if self.count else None

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Observations at or below each bound, and last all of them."""
        return tuple(accumulate(self.counts))

    def quantile(self, q: float) -> float | None:
        """Estimate a quantile, off by at most the width of the bucket that it falls into; None without observations.

        Interpolates linearly in the bucket, as histogram_quantile does
        (https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile), and never above ``max``.

        Args:
            q: 0 to 1.

        Raises:
            UsageError: ``q`` is out of range.
        """
        if not 0 <= q <= 1:
            raise UsageError(f"quantile {q} was asked for; expected one from 0 to 1")
        if not self.count:
            return None
        cumulative, rank = self.cumulative, q * self.count
        # Rounding may push the rank of q = 1 past the total; an empty bucket at rank 0 holds no quantile.
        index = bisect_left(cumulative, min(max(rank, 1e-12), self.count))
        lower = self.bounds[index - 1] if index else 0.0
        upper = min(self.bounds[index], self.max) if index < len(self.bounds) else self.max
        below = cumulative[index - 1] if index else 0
        return lower + max(0.0, upper - lower) * (rank - below) / self.counts[index]


class Histogram:
    """Counts observations into fixed buckets. Not thread-safe: whoever owns it holds the lock.

    Args:
        bounds: upper bounds of the buckets, included, strictly ascending.

    Raises:
        UsageError: the bounds do not ascend, or there is none.
    """

    __slots__ = ("_bounds", "_counts", "_max", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise UsageError(f"bounds of a histogram are {tuple(bounds)}; expected numbers that ascend strictly")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._max = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, at least 0, once or ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        if value > self._max:
            self._max = value

    def snapshot(self) -> HistogramSnapshot:
        """Copy of the counts."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum, self._max)
