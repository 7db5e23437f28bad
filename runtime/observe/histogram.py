"""Counts by bucket, and the quantiles that they allow to estimate."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate


@dataclass
class Histogram:
    """Counts of observations by bucket, with their sum and maximum. Not thread-safe: its owner gives copies away.

    Attributes:
        bounds: upper bounds of the buckets, included, strictly ascending; one more bucket above the last is open.
        counts: observations in each bucket, ``len(bounds) + 1`` of them, not accumulated.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    max: float = 0.0

    def __post_init__(self) -> None:
        self.counts = list(self.counts) or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count ``value``, at least 0."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if value > self.max:
            self.max = value

    def copy(self) -> "Histogram":
        return replace(self)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Observations at or below each bound, and last all of them."""
        return tuple(accumulate(self.counts))

    def quantile(self, q: float) -> float | None:
        """Estimate a quantile, off by at most the width of the bucket that it falls into; None without observations.

        Interpolates linearly in the bucket, as histogram_quantile does
        (https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile), and never above ``max``.
        """
        if not self.count:
            return None
        cumulative, rank = self.cumulative, q * self.count
        # Rounding may push the rank of q = 1 past the total; an empty bucket at rank 0 holds no quantile.
        index = bisect_left(cumulative, min(max(rank, 1e-12), self.count))
        lower = self.bounds[index - 1] if index else 0.0
        upper = min(self.bounds[index], self.max) if index < len(self.bounds) else self.max
        below = cumulative[index - 1] if index else 0
        return lower + max(0.0, upper - lower) * (rank - below) / self.counts[index]
