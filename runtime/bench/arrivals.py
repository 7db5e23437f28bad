"""Moments at which requests are due: a Poisson process by seed, or even gaps."""

from collections.abc import Iterator
from itertools import islice

import numpy as np


def due_times(rate: float, seed: int, even: bool = False) -> Iterator[float]:
    """Seconds from the first arrival to each, without end: gaps are exponential of mean 1 / ``rate``, or all of it."""
    generator, gap, moment = np.random.default_rng(seed), 1 / rate, 0.0
    while True:
        yield moment
        moment += gap if even else float(generator.exponential(gap))


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the first arrival to each of ``count``, a Poisson process; without a rate all arrive at once."""
    return [0.0] * count if rate is None else list(islice(due_times(rate, seed), count))
