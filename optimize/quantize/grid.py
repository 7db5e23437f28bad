"""Symmetric integer grids for weight matrices, and the layouts engines store them in.

A weight matrix W [N, K] (output features by input features) becomes integers q and scales s with

    W[n, k] ~ q[n, k] * s[n, k // block]        q in [-2^(bits-1), 2^(bits-1) - 1]

Groups run along K, so each dot product meets one scale per ``block`` products.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """Integer grid of a weight matrix. ``block`` is the number of inputs that share a scale; 0 means a whole row."""

    bits: int
    block: int = 0

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


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix: ``values`` int8 [N, K], ``scales`` float32 [N, groups] (a scale may be negative)."""

    values: NDArray[np.int8]
    scales: Float
    grid: Grid

    def dequantize(self) -> Float:
        """The matrix that the integers stand for, float32 [N, K]."""
        inputs = self.values.shape[1]
        scales = np.repeat(self.scales, self.grid.width(inputs), axis=1)[:, :inputs]
        return self.values * scales


def pack_blocks(values: NDArray[np.int8], grid: Grid) -> NDArray[np.uint8]:
    """Lay integers out as MatMulNBits and GatherBlockQuantized want them.

    Args:
        values: int8 [N, K] on ``grid``, whose block is not 0.

    Returns:
        uint8 [N, groups, block * bits / 8]: offset by 2^(bits-1), low nibble first, short last groups padded with zero.
        Source: com.microsoft.MatMulNBits in ONNX Runtime's operator documentation.
    """
    rows, inputs = values.shape
    padded: NDArray[np.uint8] = np.full((rows, grid.groups(inputs) * grid.block), -grid.low, np.uint8)
    np.add(values, -grid.low, out=padded[:, :inputs], casting="unsafe", dtype=np.int16)
    if grid.bits == 4:
        padded = np.bitwise_or(padded[:, 0::2], np.left_shift(padded[:, 1::2], 4))
    return padded.reshape(rows, grid.groups(inputs), grid.block * grid.bits // 8)


def unpack_blocks(packed: NDArray[np.uint8], grid: Grid, inputs: int) -> NDArray[np.int8]:
    """The inverse of :func:`pack_blocks`: int8 [N, ``inputs``]."""
    flat = packed.reshape(packed.shape[0], -1)
    if grid.bits == 4:
        flat = np.stack([flat & 15, flat >> 4], axis=-1).reshape(packed.shape[0], -1)
    return (flat[:, :inputs].astype(np.int16) + grid.low).astype(np.int8)
