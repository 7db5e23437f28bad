"""Random numbers that are a function of (seed, position, draw), and draws made with them."""

import math
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

_UINT64_MAX = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
