"""Blocks of integers in GGUF's types, as codes of 4 or 8 bits, scales and offsets: w = code * scale + offset.

Layouts, a block after another in a row; bytes hold several codes of a run, the first run in their lowest bits. Small
blocks begin with a scale in float16 (and a minimum), large ones of 256 weights have integers that multiply one.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Array = NDArray[Any]

# What the sixteen codes of a type stand for.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
NIBBLES, CRUMBS, BITS = (0, 4), (0, 2, 4, 6), range(8)


@dataclass(frozen=True)
class Layout:
    """The form in which a type's weights are kept.

    Attributes:
        bits: fewest that hold every code.
        block: weights that share a scale.
        codes: uint8 [R, B, bytes] -> int8 codes [R, B, weights].
        scales: the same bytes -> float32 [R, B, scales].
        offsets: the same bytes -> float32 [R, B, scales], None where they are all zero.
        half: whether scales are stored as float16.
    """

    bits: int
    block: int
    codes: Callable[[Bytes], Array]
    scales: Callable[[Bytes], Array]
    offsets: Callable[[Bytes], Array] | None = None
    half: bool = False

    def unpack(self, blocks: Bytes) -> Array:
        """The weights that the blocks stand for, float32 [R, B, weights]."""
        values: Array = self.codes(blocks) * np.repeat(self.scales(blocks), self.block, -1)
        if self.offsets is not None:
            values += np.repeat(self.offsets(blocks), self.block, -1)
        return values


def _fields(data: Bytes, run: int, shifts: Sequence[int], width: int) -> Array:
    """Codes of ``width`` bits from runs of bytes [..., n]: those at the first shift of a run, then at the next."""
    runs = data.reshape(*data.shape[:-1], -1, 1, run) >> np.array(shifts, np.uint8)[:, None]
    codes: Array = runs & np.uint8((1 << width) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def _join(low: Array, high: Array, bits: int) -> Array:
    """Codes whose upper bits lie elsewhere than the ``bits`` lower ones."""
    codes: Array = low | high << np.uint8(bits)
    return codes


def _less(codes: Array, middle: int) -> Array:
    signed: Array = codes.astype(np.int8) - np.int8(middle)
    return signed


def _half(blocks: Bytes, place: int) -> Array:
    """The float16 at a place of each block, float32 [R, B, 1]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16).astype(np.float32)


def _shifted(
    bits: int,
    middle: int,
    codes: Callable[[Bytes], Array],
    parts: Callable[[Bytes], tuple[Array, Array]],
    block: int = 32,
    half: bool = False,
) -> Layout:
    """Unsigned codes with a scale and a minimum, which ``parts`` reads: w = (code - middle) * scale + offset."""

    def offsets(blocks: Bytes) -> Array:
        scales, found = parts(blocks)
        found += scales * np.float32(middle)
        return found

    return Layout(
        bits, block, lambda blocks: _less(codes(blocks), middle), lambda blocks: parts(blocks)[0], offsets, half
    )


def _small_parts(blocks: Bytes) -> tuple[Array, Array]:
    return _half(blocks, 0), _half(blocks, 2)


def _k_parts(blocks: Bytes) -> tuple[Array, Array]:
    """Eight scales and minima of 6 bits; the upper bits of the last four lie above the first eight."""
    first, second, third = (blocks[..., place : place + 4] for place in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q2_k_parts(blocks: Bytes) -> tuple[Array, Array]:
    both = blocks[..., :16]
    return _half(blocks, 80) * (both & 15), -_half(blocks, 82) * (both >> 4)


def _q3_k_scales(blocks: Bytes) -> Array:
    low, high = _fields(blocks[..., 96:104], 8, NIBBLES, 4), _fields(blocks[..., 104:108], 4, CRUMBS, 2)
    return _half(blocks, 108) * _less(_join(low, high, 4), 32)


def _iq4_xs_scales(blocks: Bytes) -> Array:
    low, high = _fields(blocks[..., 4:8], 1, NIBBLES, 4), _fields(blocks[..., 2:4], 1, CRUMBS, 2)
    return _half(blocks, 0) * _less(_join(low, high, 4), 32)


def _fp4_scales(blocks: Bytes) -> Array:
    """Half of 2^(e - 127): the table holds doubled values."""
    scales: Array = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
    return scales


def read_fp4(blocks: Bytes) -> Array:
    """The codes of MXFP4, uint8 [R, B, 32]."""
    return _fields(blocks[..., 1:], 16, NIBBLES, 4)


def _five_bits(blocks: Bytes, high: int) -> Array:
    low = _fields(blocks[..., high + 4 :], 16, NIBBLES, 4)
    return _join(low, _fields(blocks[..., high : high + 4], 1, BITS, 1), 4)


def _q5_k(blocks: Bytes) -> Array:
    return _join(_fields(blocks[..., 48:], 32, NIBBLES, 4), _fields(blocks[..., 16:48], 32, BITS, 1), 4)


def _q6_k(blocks: Bytes) -> Array:
    return _join(_fields(blocks[..., :128], 64, NIBBLES, 4), _fields(blocks[..., 128:192], 32, CRUMBS, 2), 4)


def _q3_k(blocks: Bytes) -> Array:
    return _join(_fields(blocks[..., 32:96], 32, CRUMBS, 2), _fields(blocks[..., :32], 32, BITS, 1), 2)


def _small_scales(blocks: Bytes) -> Array:
    return _half(blocks, 0)


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(4, 32, lambda b: _less(_fields(b[..., 2:], 16, NIBBLES, 4), 8), _small_scales, half=True),
    "Q4_1": _shifted(4, 8, lambda b: _fields(b[..., 4:], 16, NIBBLES, 4), _small_parts, half=True),
    "Q5_0": Layout(5, 32, lambda b: _less(_five_bits(b, 2), 16), _small_scales, half=True),
    "Q5_1": _shifted(5, 16, lambda b: _five_bits(b, 4), _small_parts, half=True),
    "Q8_0": Layout(8, 32, lambda b: b[..., 2:].view(np.int8), _small_scales, half=True),
    "Q2_K": _shifted(2, 2, lambda b: _fields(b[..., 16:80], 32, CRUMBS, 2), _q2_k_parts, 16),
    "Q3_K": Layout(3, 16, lambda b: _less(_q3_k(b), 4), _q3_k_scales),
    "Q4_K": _shifted(4, 8, lambda b: _fields(b[..., 16:], 32, NIBBLES, 4), _k_parts),
    "Q5_K": _shifted(5, 16, _q5_k, _k_parts),
    "Q6_K": Layout(6, 16, lambda b: _less(_q6_k(b), 32), lambda b: _half(b, 208) * b[..., 192:208].view(np.int8)),
    "IQ4_NL": Layout(8, 32, lambda b: _IQ4[_fields(b[..., 2:], 16, NIBBLES, 4)], _small_scales, half=True),
    "IQ4_XS": Layout(8, 32, lambda b: _IQ4[_fields(b[..., 8:], 16, NIBBLES, 4)], _iq4_xs_scales),
    "MXFP4": Layout(5, 32, lambda b: _FP4[read_fp4(b)], _fp4_scales),
}
