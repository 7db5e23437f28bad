"""Histograms: what falls into which bucket, and how near the quantiles come."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest

from llmc.runtime.observe.histogram import Histogram
from llmc.runtime.observe.metrics import SECONDS_BUCKETS

QUANTILES = (0.013, 0.05, 0.25, 0.5, 0.77, 0.95, 0.99, 1.0)


def filled(values: np.ndarray, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(float(value))
    return histogram


def width(value: float, largest: float, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> float:
    """Of the bucket that holds the value: nothing finer is known of where in it an observation lies."""
    index = bisect_left(bounds, value)
    lower = bounds[index - 1] if index else 0.0
    return (bounds[index] if index < len(bounds) else largest) - lower


def quantiles_off(snapshot: Histogram, values: np.ndarray) -> list[float]:
    """The quantiles that miss NumPy's by more than the bucket's width."""
    exact = {q: float(np.quantile(values, q, method="inverted_cdf")) for q in QUANTILES}
    return [q for q, value in exact.items() if abs(snapshot.quantile(q) - value) > width(value, float(values.max()))]


def samples(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "latencies": rng.lognormal(-4, 1.2, 5000),
        "two modes": np.concatenate([rng.normal(0.01, 0.001, 900), rng.normal(2.0, 0.1, 100)]),
        "beyond the last bucket": rng.uniform(500, 9000, 700),
        "below the first bucket": rng.uniform(0, 5e-5, 300),
        "few": rng.exponential(0.1, 3),
        "one": np.array([0.0042]),
        "zeros": np.zeros(10),
    }


@pytest.mark.parametrize("kind", samples(0))
@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_numpys_within_the_width_of_a_bucket(kind: str, seed: int):
    values = samples(seed)[kind]
    assert quantiles_off(filled(values), values) == []


@pytest.mark.parametrize("kind", ["latencies", "two modes", "beyond the last bucket"])
def test_counts_that_slip_by_two_buckets_are_noticed(kind: str):
    values = samples(0)[kind]
    snapshot = filled(values)
    slipped = replace(snapshot, counts=snapshot.counts[2:] + snapshot.counts[:2])
    assert quantiles_off(slipped, values)


def test_a_bound_belongs_to_its_bucket():
    snapshot = filled(np.array([1.0, 1.0000001, 2.0, 2.1]), (1.0, 2.0))
    assert snapshot.counts == [1, 2, 1]
    assert snapshot.cumulative == (1, 3, 4)
