"""Rotary position embeddings."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from llmc.export.parts.rope import Rope


class RotaryEmbedding(nn.Module):
    """The angles of one rope, or of none: positions turn by zero."""

    inv_freq: Tensor  # (R/2)

    def __init__(self, frequencies: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(frequencies), persistent=False)


class SwitchingRope(RotaryEmbedding):
    """The angles of a rope with other factors for long texts."""

    long_inv_freq: Tensor  # (R/2)

    def __init__(self, rope: Rope) -> None:
        super().__init__(inverse_frequencies(rope))
        self.original = rope.original_max_positions
        self.register_buffer("long_inv_freq", torch.tensor(inverse_frequencies(rope, long=True)), persistent=False)

    def forward(self, text_lengths: Tensor) -> Tensor:
        """Lengths (B) of texts -> the angles (B, 1, R/2) of each."""
        is_long = (text_lengths > self.original).unsqueeze(-1).unsqueeze(-1)
        return torch.where(is_long, self.long_inv_freq, self.inv_freq)


def make_rope(rope: Rope) -> RotaryEmbedding:
    return SwitchingRope(rope) if rope.long_factors else RotaryEmbedding(inverse_frequencies(rope))


def inverse_frequencies(rope: Rope, *, long: bool = False) -> npt.NDArray[np.float32]:
    """Angle per position of each rotated pair, float32 [dim / 2]; ``long`` of longrope's long texts.

    Source: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595) for ``linear``; for ``llama3`` the
    ``apply_scaling`` of Meta's llama-models repository; arXiv 2309.00071 for ``yarn``, 2402.13753 for ``longrope``.
    Computed in float32, as transformers does.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    powers = np.power(np.float32(rope.theta), exponents)
    frequencies = np.float32(1) / (powers * np.array((rope.long_factors if long else rope.factors) or 1, np.float32))
    if rope.type == "proportional":
        frequencies[int(rope.share * rope.dim // 2) :] = 0
    if rope.type in ("linear", "proportional"):
        frequencies = frequencies / np.float32(rope.factor)
    if rope.type == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.type == "yarn":
        frequencies = _yarn(frequencies, rope)
    return np.append(np.asarray(frequencies, np.float32), np.zeros(rope.still // 2, np.float32))


def _llama3(frequencies: npt.NDArray[np.float32], rope: Rope) -> npt.NDArray[np.float32]:
    """Keep short wavelengths, divide long ones by ``factor``, and blend linearly between."""
    turns = np.float32(rope.original_max_positions) * frequencies / np.float32(2 * np.pi)
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, np.float32(0), np.float32(1))
    return np.asarray((1 - blend) * frequencies / np.float32(rope.factor) + blend * frequencies, np.float32)


def _yarn(frequencies: npt.NDArray[np.float32], rope: Rope) -> npt.NDArray[np.float32]:
    """Keep the frequencies of pairs with many turns within the original positions, divide those with few turns by
    ``factor``, and blend linearly between."""
    last = 2 * len(frequencies) - 1
    first, end = (_pair_that_turns(turns, rope) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, end = math.floor(first), math.ceil(end)
    first, end = max(first, 0), min(end, last)
    width = np.float32(end - first if end != first else 0.001)  # no pair between: a step
    blend = np.clip((np.arange(len(frequencies), dtype=np.float32) - np.float32(first)) / width, 0, 1)
    return np.asarray(frequencies / np.float32(rope.factor) * blend + frequencies * (1 - blend), np.float32)


def _pair_that_turns(turns: float, rope: Rope) -> float:
    """Index (a fraction) of the pair with this many turns within the original positions."""
    return rope.dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
