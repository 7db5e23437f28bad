"""Random numbers that are a function of (seed, position, draw), and draws made with them."""

import math
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

_UINT64_MAX = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 256  # weights whose sum is looked at first


def uniform(seed: int, position: int, draw: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but its arguments (each from 0 to 2**64 - 1).

    The arguments are hashed one after the other by the output function of splitmix64 (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, OOPSLA 2014; constants of https://prng.di.unimi.it/splitmix64.c).
    """
    return (_mix(_mix(_mix(seed) ^ position) ^ draw) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    """One step of splitmix64 from ``state``: a bijection of 64 bits that scatters neighbours."""
    state = (state + _GOLDEN) & _UINT64_MAX
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MAX
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64_MAX
    return state ^ (state >> 31)


def uniforms(seed: int, position: int) -> Iterator[float]:
    """The numbers of draws 0, 1, ... at a position."""
    here = _mix(_mix(seed) ^ position)
    for draw in count():
        yield (_mix(here ^ draw) >> 11) * 2.0**-53


def pick(cumulative: npt.NDArray[np.float64], point: float) -> int:
    """Index of the interval of ``cumulative`` that ``point`` (in [0, 1)) of its total falls into; never empty."""
    total = float(cumulative[-1])
    return int(cumulative.searchsorted(min(point * total, math.nextafter(total, 0.0)), side="right"))


def pick_weighted(weights: npt.NDArray[np.float32], point: float) -> int:
    """Index of the weight (from 0, some above 0) that ``point`` (in [0, 1)) of their sum falls into; never one of 0.

    Sums are float64: of blocks first, then inside the block that the point falls into. A running sum over a large
    vocabulary takes twenty times as long.
    """
    whole = weights.size - weights.size % _BLOCK
    blocks = np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1, dtype=np.float64)
    sums = np.append(blocks, np.add.reduce(weights[whole:], dtype=np.float64)).cumsum()
    block = pick(sums, point)
    before = float(sums[block - 1]) if block else 0.0
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    return block * _BLOCK + pick(inside, max(0.0, point * float(sums[-1]) - before) / float(inside[-1]))
