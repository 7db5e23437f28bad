"""GGML's block types, which GGUF files use for matrices: w = code * scale + offset, with codes of 2, 4 or 8 bits.

Tables describe where a block's bytes hold its numbers. numpy reads blocks with them here, and
:mod:`llmc.export.ggml_ops` makes ONNX functions from them. Small blocks begin with a float16 scale (and a minimum);
large ones, of 256 weights, also have integers that multiply it.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.linear import Codes

Bytes = NDArray[np.uint8]
Array = NDArray[Any]

# Values of the sixteen codes of a type.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# Twice the values of 4-bit floats (E2M1), by code.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
NIBBLES, CRUMBS, BITS = (0, 4), (0, 2, 4, 6), range(8)


@dataclass(frozen=True, eq=False)
class Bits:
    """A field of bits for each number of a block: ``((bytes[at] >> shift) & mask) << up``."""

    at: NDArray[np.int64]  # byte positions in the block, int64 [n]
    # uint8 [n]
    shift: Bytes
    mask: Bytes
    up: int = 0  # bit position of the field in the number


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a block: ``values[bits]``, times the float16 at byte ``half``."""

    # fields that make up an index of ``values`` together; none where the float16 is the only number
    bits: tuple[Bits, ...]
    values: Array  # int8 or float32, by index; without bits one, the float16's factor
    half: int | None = None  # None where nothing multiplies the values
    rows: NDArray[np.int32] | None = None  # added to indices, where each number of a block has its own values

    def index(self, blocks: Bytes) -> Bytes:
        """Blocks uint8 [R, bytes] -> the indices of their numbers, uint8 [R, n]."""
        fields = [(blocks.take(bits.at, 1) >> bits.shift & bits.mask) << np.uint8(bits.up) for bits in self.bits]
        indices: Bytes = np.bitwise_or.reduce(fields) if len(fields) > 1 else fields[0]
        return indices

    def read(self, blocks: Bytes) -> Array:
        """Blocks uint8 [R, bytes] -> their numbers [R, n], float32 if a float16 multiplies them."""
        values = self.values
        if self.bits:
            index = self.index(blocks)
            values = self.values.take(index if self.rows is None else index + self.rows)
        if self.half is None:
            return values
        factor = np.ascontiguousarray(blocks[:, self.half : self.half + 2]).view(np.float16).astype(np.float32)
        product: Array = factor * values
        return product


@dataclass(frozen=True, eq=False)
class Layout:
    """A block type."""

    size: int  # bytes of a block
    bits: int  # of a code in a bundle: 2, 4 or 8
    codes: Numbers  # int8, one per weight
    scales: Numbers  # float32, one per ``block`` weights
    minima: Numbers | None = None  # float32, as many as scales; None if all are zero
    middle: int = 0  # subtracted from unsigned codes, so that an offset is a minimum plus ``middle`` scales

    @property
    def weights(self) -> int:
        return len(self.codes.bits[0].at)

    @property
    def block(self) -> int:
        return self.weights // (len(self.scales.bits[0].at) if self.scales.bits else 1)

    @property
    def kind(self) -> Codes:
        """The integer format of a matrix in these blocks."""
        return Codes(self.bits, self.block, zero_points=False, offsets=self.minima is not None)

    @property
    def table_kind(self) -> Codes:
        """The integer format of a table in these blocks, with the fewest bits that hold every code."""
        codes = self.codes.values
        bits = max(int(codes.max()), ~int(codes.min())).bit_length() + 1
        return replace(self.kind, bits=bits, half=not self.scales.bits)

    def offsets(self, blocks: Bytes) -> Array | None:
        """Blocks uint8 [R, bytes] -> offsets float32 [R, scales]; None if all are zero."""
        if self.minima is None:
            return None
        offsets: Array = self.minima.read(blocks) + self.scales.read(blocks) * np.float32(self.middle)
        return offsets

    def unpack(self, rows: Bytes) -> NDArray[np.float32]:
        """Rows of blocks uint8 [N, bytes] -> the weights float32 [N, K]."""
        blocks = rows.reshape(-1, self.size)
        values: Array = self.codes.read(blocks) * np.repeat(self.scales.read(blocks), self.block, 1)
        if (offsets := self.offsets(blocks)) is not None:
            values += np.repeat(offsets, self.block, 1)
        return values.reshape(len(rows), -1)


def _run(first: int, count: int, run: int, shifts: Sequence[int], width: int, up: int = 0) -> Bits:
    """Fields of ``width`` bits from ``count`` bytes: per run of bytes, all fields at the first shift, then the next."""
    at, shift = np.broadcast_arrays(
        (first + np.arange(count)).reshape(-1, 1, run), np.array(shifts, np.uint8).reshape(1, -1, 1)
    )
    return Bits(at.ravel(), shift.ravel(), np.full(at.size, (1 << width) - 1, np.uint8), up)


def _beside(*parts: Bits) -> Bits:
    """The fields of all parts, in order."""
    at, shift, mask = (np.concatenate([getattr(part, name) for part in parts]) for name in ("at", "shift", "mask"))
    return Bits(at, shift, mask, parts[0].up)


def _codes(middle: int, *bits: Bits) -> Numbers:
    width = max(field.up + int(field.mask[0]).bit_length() for field in bits)
    return Numbers(bits, (np.arange(1 << width) - middle).astype(np.int8))


def _scales(half: int, *bits: Bits, middle: int = 0, sign: int = 1) -> Numbers:
    """Integers of at most 8 bits, less ``middle``, times a float16; without bits only the float16 or its negative."""
    values = np.arange(256, dtype=np.float32) - middle if bits else np.ones(1, np.float32)
    return Numbers(bits, values * sign, half)


def _small(size: int, bits: int, codes: Numbers, middle: int | None = None) -> Layout:
    """Blocks with a float16 scale, and with ``middle`` a minimum after it."""
    minima = None if middle is None else _scales(2)
    return Layout(size, bits, codes, _scales(0), minima, middle or 0)


def _five_bits(middle: int, high: int) -> Numbers:
    return _codes(middle, _run(high + 4, 16, 16, NIBBLES, 4), _run(high, 4, 1, BITS, 1, up=4))


# Eight scales and minima of 6 bits; the upper bits of the last four are in the first eight bytes.
_K_HIGH = {
    at: Bits(np.arange(at - 4, at + 4), np.full(8, 6, np.uint8), np.array([0] * 4 + [3] * 4, np.uint8), 4)
    for at in (4, 8)
}
_K_SCALES = _scales(0, _beside(_run(4, 4, 4, (0,), 6), _run(12, 4, 4, (0,), 4)), _K_HIGH[4])
_K_MINIMA = _scales(2, _beside(_run(8, 4, 4, (0,), 6), _run(12, 4, 4, (4,), 4)), _K_HIGH[8], sign=-1)
_SIGNED = np.arange(256).astype(np.uint8).view(np.int8)
# Codes of 2 bits stand for -1 to 2. Integers of 2 bits reach from -2 to 1: they hold the negatives.
_CRUMB_VALUES = np.array([1, 0, -1, -2], np.int8)


def _crumbs(size: int, first: int, count: int, run: int, half: int) -> Layout:
    codes = Numbers((_run(first, count, run, CRUMBS, 2),), _CRUMB_VALUES)
    return Layout(size, 2, codes, _scales(half, sign=-1))


def _trits(*runs: tuple[int, int, int]) -> Numbers:
    """Bytes that hold digits of base 3, as a fraction of 243 in 256ths: runs of first byte, count and digits."""
    digits = [(np.repeat(np.arange(n), count), np.tile(first + np.arange(count), n)) for first, count, n in runs]
    digit, at = (np.concatenate(parts) for parts in zip(*digits, strict=True))
    powers = np.arange(256) * 3 ** np.arange(5)[:, None] & 255
    whole = Bits(at, np.zeros(len(at), np.uint8), np.full(len(at), 255, np.uint8))
    return Numbers((whole,), ((powers * 3 >> 8) - 1).astype(np.int8).ravel(), rows=(256 * digit).astype(np.int32))


def _unsigned_e4m3() -> Array:
    """Half of each scale of NVFP4, by byte: 4 bits of an exponent, 3 of a fraction; the largest means 0."""
    exponents, fractions = np.arange(256) >> 3 & 15, np.arange(256) % 8
    values = np.where(exponents > 0, np.ldexp(1 + fractions / 8, exponents - 7), fractions / 512) / 2
    values[127] = 0
    return values.astype(np.float32)


LAYOUTS: dict[str, Layout] = {
    "Q4_0": _small(18, 4, _codes(8, _run(2, 16, 16, NIBBLES, 4))),
    "Q4_1": _small(20, 4, _codes(8, _run(4, 16, 16, NIBBLES, 4)), 8),
    "Q5_0": _small(22, 8, _five_bits(16, 2)),
    "Q5_1": _small(24, 8, _five_bits(16, 4), 16),
    "Q8_0": _small(34, 8, Numbers((_run(2, 32, 32, (0,), 8),), _SIGNED)),
    "Q2_K": Layout(
        84,
        4,
        _codes(2, _run(16, 64, 32, CRUMBS, 2)),
        _scales(80, _run(0, 16, 16, (0,), 4)),
        _scales(82, _run(0, 16, 16, (4,), 4), sign=-1),
        2,
    ),
    "Q3_K": Layout(
        110,
        4,
        _codes(4, _run(32, 64, 32, CRUMBS, 2), _run(0, 32, 32, BITS, 1, up=2)),
        _scales(108, _run(96, 8, 8, NIBBLES, 4), _run(104, 4, 4, CRUMBS, 2, up=4), middle=32),
    ),
    "Q4_K": Layout(144, 4, _codes(8, _run(16, 128, 32, NIBBLES, 4)), _K_SCALES, _K_MINIMA, 8),
    "Q5_K": Layout(
        176, 8, _codes(16, _run(48, 128, 32, NIBBLES, 4), _run(16, 32, 32, BITS, 1, up=4)), _K_SCALES, _K_MINIMA, 16
    ),
    "Q6_K": Layout(
        210,
        8,
        _codes(32, _run(0, 128, 64, NIBBLES, 4), _run(128, 64, 32, CRUMBS, 2, up=4)),
        Numbers((_run(192, 16, 16, (0,), 8),), _SIGNED.astype(np.float32), 208),
    ),
    "IQ4_NL": _small(18, 8, Numbers((_run(2, 16, 16, NIBBLES, 4),), _IQ4)),
    "IQ4_XS": Layout(
        136,
        8,
        Numbers((_run(8, 128, 16, NIBBLES, 4),), _IQ4),
        _scales(0, _run(4, 4, 1, NIBBLES, 4), _run(2, 2, 1, CRUMBS, 2, up=4), middle=32),
    ),
    "Q1_0": Layout(18, 2, Numbers((_run(2, 16, 1, BITS, 1),), np.array([-1, 1], np.int8)), _scales(0)),
    "Q2_0": _crumbs(18, 2, 16, 1, 0),
    "TQ1_0": Layout(54, 2, _trits((0, 32, 5), (32, 16, 5), (48, 4, 4)), _scales(52)),
    "TQ2_0": _crumbs(66, 0, 64, 32, 64),
    # The table holds doubled values, with scales of half of 2^(e - 127), and of half of NVFP4's.
    "MXFP4": Layout(
        17,
        8,
        Numbers((_run(1, 16, 16, NIBBLES, 4),), E2M1),
        Numbers((_run(0, 1, 1, (0,), 8),), np.ldexp(np.float32(1), np.arange(256) - 128)),
    ),
    "NVFP4": Layout(
        36, 8, Numbers((_run(4, 32, 8, NIBBLES, 4),), E2M1), Numbers((_run(0, 4, 4, (0,), 8),), _unsigned_e4m3())
    ),
}
