"""Rotary position embeddings."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding."""

    dim: int  # values of a head that are rotated, in pairs
    theta: float  # base of the frequencies
    type: RopeType = "default"
    factor: float = 1.0  # divides all frequencies (linear, proportional), or the low ones (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3 blends between so many turns within the original positions
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # that the model was trained with
    beta_slow: float = 1.0  # yarn blends between so many turns
    beta_fast: float = 32.0
    truncate: bool = True  # yarn blends between whole pairs
    factors: tuple[float, ...] = ()  # each divides one frequency (longrope), in texts of any length or
    long_factors: tuple[float, ...] = ()  # with these only up to ``original_max_positions`` tokens
    share: float = 1.0  # fraction of the pairs that turn, the first ones (proportional)
    magnitude: float = 1.0  # factor of the rotated vectors' length
    still: int = 0  # values of a head behind the ``dim`` turned ones that turn by zero, so that their queries grow too
    interleaved: bool = False  # a pair is two neighbours, not one value of each half
