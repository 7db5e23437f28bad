"""Random numbers that are a function of (seed, position, draw), and draws made with them."""

import numpy as np
import numpy.typing as npt

_UINT64_MAX = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 256  # weights summed at once: summing a large vocabulary one by one takes 1 ms


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


def pick(weights: npt.NDArray[np.float32], point: float) -> int:
    """The index drawn in proportion to ``weights`` [n] (some above 0) by ``point`` in [0, 1); never one of weight 0."""
    blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64)
    block, rest = _find(blocks, point * float(blocks.sum()))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].astype(np.float64)
    return block * _BLOCK + _find(inside, rest)[0]


def _find(weights: npt.NDArray[np.float64], point: float) -> tuple[int, float]:
    """The index of the weight that contains ``point``, and the offset in it; rounding never leads past the last."""
    ends = weights.cumsum()
    index = int(ends.searchsorted(min(point, np.nextafter(ends[-1], 0.0)), side="right"))
    return index, point - float(ends[index] - weights[index])
