"""Integer grids for weight matrices, and the layouts engines store them in.

A weight matrix W [N, K] (output features by input features) becomes integers q, scales s and, on an asymmetric grid,
integer zero points z with

    W[n, k] ~ (q[n, k] - z[n, k // block]) * s[n, k // block]        q, z in [-2^(bits-1), 2^(bits-1) - 1]

A shifted grid, which only checkpoints come on, adds a float offset per group.

Groups run along K, so each dot product meets one scale per ``block`` products. As z is an integer, zero stays zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.linear import Codes

Float = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

# The scale of a group of zeros where scales are above zero: the smallest whose inverse float32 holds too.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """Integer grid of a weight matrix. ``block`` is the number of inputs that share a scale; 0 means a whole row.

    A grid that is not ``symmetric`` has a zero point for each scale. Scales of a ``positive`` grid, which is symmetric,
    are all above zero; otherwise a negative one lets the weight of largest magnitude meet the longer, negative end.
    """

    bits: int
    block: int = 0
    symmetric: bool = True
    positive: bool = False
    shifted: bool = False

    def __post_init__(self) -> None:
        assert self.symmetric or not (self.positive or self.shifted), "only a symmetric grid can be positive or shifted"

    @property
    def low(self) -> int:
        """Smallest integer, -2^(bits-1)."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest integer, 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    def width(self, inputs: int) -> int:
        """Inputs per scale for rows of ``inputs`` weights."""
        return self.block or inputs

    def groups(self, inputs: int) -> int:
        """Scales per row; the last group of a row may be short."""
        return -(-inputs // self.width(inputs))

    def holds(self, codes: Codes, inputs: int) -> bool:
        """True if a checkpoint's integers of rows of ``inputs`` weights are on it, with its blocks within theirs."""
        fits = codes.block == inputs or (self.block > 0 and codes.block % self.block == 0)
        kind = (codes.kind, not codes.zero_points, codes.offsets)
        return fits and codes.bits in (2, self.bits) and kind == ("integer", self.symmetric, self.shifted)


# Grid of the offsets.
OFFSETS = Grid(8, 16)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix."""

    values: NDArray[np.int8]  # int8 [N, K]
    scales: Float  # float32 [N, groups]; on a symmetric grid a scale may be negative, unless the grid is positive
    grid: Grid  # what the integers are on
    zero_points: NDArray[np.int8] | None = None  # int8 [N, groups]; None on a symmetric grid
    offsets: Float | None = None  # float32 [N, groups]; None unless the grid is shifted

    def dequantize(self) -> Float:
        """The matrix that the integers stand for, float32 [N, K]."""
        scales = self._per_input(self.scales)
        if self.offsets is not None:
            return self.values * scales + self._per_input(self.offsets)
        if self.zero_points is None:
            return self.values * scales
        return np.subtract(self.values, self._per_input(self.zero_points), dtype=np.int16) * scales

    def rows(self, places: slice | NDArray[np.int64]) -> "Quantized":
        zeros = None if self.zero_points is None else self.zero_points[places]
        return replace(self, values=self.values[places], scales=self.scales[places], zero_points=zeros)

    def _per_input(self, per_group: NDArray[T]) -> NDArray[T]:
        """[N, groups] -> [N, K]."""
        inputs = self.values.shape[1]
        return np.repeat(per_group, self.grid.width(inputs), axis=1)[:, :inputs]


def stack(parts: Sequence[Quantized]) -> Quantized:
    """Rows of several matrices [N_i, K] on one grid as one."""
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Quantized(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        parts[0].grid,
        np.concatenate(zeros) if zeros else None,
        np.concatenate(offsets) if offsets else None,
    )


def pack_blocks(values: NDArray[np.int8], grid: Grid) -> NDArray[np.uint8]:
    """Lay integers out as MatMulNBits and GatherBlockQuantized want them.

    Args:
        values: int8 [N, K] on ``grid``, whose block is not 0.

    Returns:
        uint8 [N, groups, block * bits / 8]: offset by 2^(bits-1), low nibble first, short last groups padded with zero.
        Source: com.microsoft.MatMulNBits in ONNX Runtime's operator documentation.
    """
    rows, inputs = values.shape
    groups = grid.groups(inputs)
    return _pack(values, grid, groups * grid.block).reshape(rows, groups, grid.block * grid.bits // 8)


def pack_rows(values: NDArray[np.int8], grid: Grid) -> NDArray[np.uint8]:
    """Lay rows of integers out as MatMulNBits and GatherBlockQuantized want zero points.

    Args:
        values: int8 [N, C] on ``grid``.

    Returns:
        uint8 [N, ceil(C * bits / 8)]: offset by 2^(bits-1), low nibble first, an odd last nibble paired with zero.
        Source: com.microsoft.MatMulNBits in ONNX Runtime's operator documentation.
    """
    columns = values.shape[1]
    return _pack(values, grid, columns + -columns % (8 // grid.bits))


def unpack_rows(packed: NDArray[np.uint8], grid: Grid, columns: int) -> NDArray[np.int8]:
    """The integers int8 [N, ``columns``] that :func:`pack_rows` laid out."""
    if grid.bits == 4:
        packed = np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)[:, :columns]
    return np.add(packed, grid.low, dtype=np.int16).astype(np.int8)


def _pack(values: NDArray[np.int8], grid: Grid, width: int) -> NDArray[np.uint8]:
    """int8 [N, C] -> uint8 [N, ``width`` * bits / 8]."""
    padded: NDArray[np.uint8] = np.full((len(values), width), -grid.low, np.uint8)
    np.add(values, -grid.low, out=padded[:, : values.shape[1]], casting="unsafe", dtype=np.int16)
    fields = 8 // grid.bits
    packed = padded[:, ::fields]
    for place in range(1, fields):
        packed = np.bitwise_or(packed, np.left_shift(padded[:, place::fields], place * grid.bits))
    return packed
