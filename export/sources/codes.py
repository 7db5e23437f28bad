"""Quantized matrices of integers with a scale per block, in ONNX's format.

    W[n, k] = (codes[n, k] - zero_points[n, k // block]) * scales[n, k // block] + offsets[n, k // block]

Codes are signed: 8 or 128 is subtracted from unsigned codes and their zero points. Two 4-bit codes share a byte, the
first in its low half, as in ONNX.
Source: DequantizeLinear-21 of the ONNX operators.

GGUF files store blocks with codes and scales together, see :mod:`llmc.ggml`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.linear import Codes
from llmc.export.sources.made import MadeTensor
from llmc.export.sources.safetensors import StoredTensor
from llmc.ggml import LAYOUTS

CODE_TYPES = {"I4": 4, "I8": 8}
# Values that share a scale in MXFP4.
MXFP4_BLOCK = 32


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix W [N, K]."""

    codes: StoredTensor | MadeTensor  # [N, K] of type I4 or I8
    block: int  # columns that share a scale; a divisor of K
    scales: Callable[[], NDArray[np.float32]]  # computes float32 [N, K / block]
    # computes int8 [N, K / block]; None if all are zero
    zero_points: Callable[[], NDArray[np.int8]] | None = None
    # computes float32 [N, K / block]; None if all are zero
    offsets: Callable[[], NDArray[np.float32]] | None = None
    # int32 [K] if columns are permuted: column k of W is column order[k] of ``codes``; else None
    order: NDArray[np.int32] | None = None
    stacked: int = 0  # number of experts whose matrices are stacked; 0 for any other matrix

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.codes.shape
        return (self.stacked, rows // self.stacked, columns) if self.stacked else (rows, columns)

    @property
    def dtype(self) -> str:
        return self.codes.dtype

    @property
    def kind(self) -> Codes:
        """The integer format, as the geometry lists it."""
        return Codes(CODE_TYPES[self.dtype], self.block, self.zero_points is not None, self.offsets is not None)

    def parts(self) -> dict[str, StoredTensor | MadeTensor]:
        """The stored tensors, by suffixes of the matrix's name."""
        scales, groups = self.scales, (self.codes.shape[0], self.codes.shape[1] // self.block)
        parts: dict[str, StoredTensor | MadeTensor] = {"": self.codes}
        parts[".scales"] = MadeTensor("F32", groups, lambda: iter([scales()]))
        if (zeros := self.zero_points) is not None:
            parts[".zero_points"] = MadeTensor(self.dtype, groups, lambda: iter([_store_codes(zeros(), self.dtype)]))
        if (offsets := self.offsets) is not None:
            parts[".offsets"] = MadeTensor("F32", (*groups, 1), lambda: iter([offsets()[..., None]]))
        if (order := self.order) is not None:
            parts[".order"] = MadeTensor("I32", order.shape, lambda: iter([order]))
        return parts


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The matrices W [E, N, K] of all experts in MXFP4: 4-bit floats, 32 of which share a power of two.

    Source: OCP Microscaling Formats (MX) 1.0.
    """

    codes: StoredTensor | MadeTensor  # uint8 [E, N, K / 2], E2M1, the first of two in the low half
    scales: StoredTensor | MadeTensor  # uint8 [E, N, K / 32], exponents with 127 added
    dtype = "U8"
    kind = Codes(4, MXFP4_BLOCK, zero_points=False, kind="mxfp4")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:2], 2 * self.codes.shape[2])

    def parts(self) -> dict[str, StoredTensor | MadeTensor]:
        return {"": self.codes, ".scales": self.scales}


@dataclass(frozen=True, eq=False)
class GgmlTensor:
    """A matrix W [N, K] in GGML's blocks, which stay where they lie in GGUF files."""

    stored: tuple[StoredTensor, ...]  # one or two matrices of one type and one width, the second below the first
    # int32 [N], indices of W's rows in ``stored``; None if they are all of its rows in order
    rows: NDArray[np.int32] | None = None
    columns: NDArray[np.int32] | None = None  # int32 [K], indices of W's columns; None if they are in order
    stacked: int = 0  # as in :class:`QuantizedTensor`

    @property
    def shape(self) -> tuple[int, ...]:
        count = len(self.rows) if self.rows is not None else sum(tensor.shape[0] for tensor in self.stored)
        columns = self.stored[0].shape[1]
        return (self.stacked, count // self.stacked, columns) if self.stacked else (count, columns)

    @property
    def dtype(self) -> str:
        return self.stored[0].dtype

    @property
    def kind(self) -> Codes:
        return LAYOUTS[self.dtype].kind

    def parts(self) -> dict[str, StoredTensor | MadeTensor]:
        """The stored tensors, as in :class:`QuantizedTensor`; the ``dtype`` of bytes is their block type."""
        parts: dict[str, StoredTensor | MadeTensor] = {}
        for part, stored in zip(("", ".second"), self.stored, strict=False):
            parts[part] = replace(stored, shape=(stored.shape[0], stored.length // stored.shape[0]))
        for part, order in ((".rows", self.rows), (".columns", self.columns)):
            if order is not None:
                parts[part] = MadeTensor("I32", order.shape, partial(iter, [order]))
        return parts

    def slice(self, start: int, stop: int) -> "GgmlTensor":
        if self.rows is not None or len(self.stored) > 1:
            rows = np.arange(self.shape[0], dtype=np.int32) if self.rows is None else self.rows
            return replace(self, rows=rows[start:stop])
        return replace(self, stored=(_slice_stored(self.stored[0], start, stop),))


def join_stacks(first: GgmlTensor, second: GgmlTensor) -> GgmlTensor:
    """For each expert, the rows of its matrix in the first stack, then the rows in the second."""
    count, rows = first.shape[:2]
    places = np.arange(2 * count * rows, dtype=np.int32).reshape(2, count, rows)
    return replace(first, stored=(*first.stored, *second.stored), rows=places.swapaxes(0, 1).ravel())


Weight = StoredTensor | MadeTensor | QuantizedTensor | Mxfp4Tensor | GgmlTensor


def flatten_tensors(tensors: Mapping[str, Weight]) -> dict[str, StoredTensor | MadeTensor]:
    """Tensors by name, quantized ones as their parts: ``P.weight`` holds the codes, ``P.weight.scales`` and so on."""
    flat: dict[str, StoredTensor | MadeTensor] = {}
    for name, tensor in tensors.items():
        parts = tensor.parts() if isinstance(tensor, QuantizedTensor | Mxfp4Tensor | GgmlTensor) else {"": tensor}
        flat |= {f"{name}{part}": value for part, value in parts.items()}
    return flat


@overload
def rows_of(tensor: StoredTensor | MadeTensor, start: int, stop: int) -> StoredTensor | MadeTensor: ...
@overload
def rows_of(tensor: Weight, start: int, stop: int) -> Weight: ...
def rows_of(tensor: Weight, start: int, stop: int) -> Weight:
    """Rows of a tensor whose rows start at whole bytes."""
    assert not isinstance(tensor, Mxfp4Tensor), "experts are not packed with other tensors"
    shape = (stop - start, *tensor.shape[1:])
    if isinstance(tensor, StoredTensor):
        return _slice_stored(tensor, start, stop)
    if isinstance(tensor, QuantizedTensor):
        return _slice_quantized(tensor, start, stop)
    if isinstance(tensor, GgmlTensor):
        return tensor.slice(start, stop)

    def pieces() -> Iterator[NDArray[Any]]:
        position = 0
        for piece in tensor.pieces():
            yield piece[max(0, start - position) : max(0, stop - position)]
            position += len(piece)

    return MadeTensor(tensor.dtype, shape, pieces)


def _slice_stored(tensor: StoredTensor, start: int, stop: int) -> StoredTensor:
    row = tensor.length // tensor.shape[0]
    shape = (stop - start, *tensor.shape[1:])
    return StoredTensor(tensor.file, tensor.offset + start * row, (stop - start) * row, tensor.dtype, shape)


def _slice_quantized(tensor: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    zeros, offsets = tensor.zero_points, tensor.offsets
    return replace(
        tensor,
        codes=rows_of(tensor.codes, start, stop),
        scales=lambda: tensor.scales()[start:stop],
        zero_points=None if zeros is None else lambda: zeros()[start:stop],
        offsets=None if offsets is None else lambda: offsets()[start:stop],
    )


def pack_codes(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack 4-bit codes [N, K], K even, into uint8 [N, K / 2]."""
    halves = codes.view(np.uint8)
    packed: NDArray[np.uint8] = (halves[:, 0::2] & np.uint8(15)) | (halves[:, 1::2] << np.uint8(4))
    return packed


def _store_codes(codes: NDArray[np.int8], dtype: str) -> NDArray[Any]:
    if dtype == "I8":
        return codes
    flat = codes.reshape(1, -1)
    return pack_codes(np.pad(flat, ((0, 0), (0, flat.size % 2))))
