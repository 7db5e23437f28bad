"""Read the weights of an export by rows; its graph stores where each weight is."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from llmc.bundle import DECODER_FILE
from llmc.bundle.model.linear import Codes
from llmc.errors import BuildError, CheckpointError
from llmc.ggml import LAYOUTS, Layout
from llmc.origin import find_own_file, weight_files

S = TypeVar("S")
T = TypeVar("T")

# Weights per piece: as float32 (1 MiB) it stays in the second-level cache, and is large enough to amortise a call.
PIECE = 1 << 18


def weights_identity(export: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change (ns) of each weight file of an export, for cache keys of derived results."""
    files = ((path.name, path.stat()) for path in weight_files(export))
    return [(name, info.st_size, info.st_mtime_ns) for name, info in files]


# Rows of a matrix: codes [n, K], scales [n, groups], zero points and offsets shaped like scales, or None.
CodedRows = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int8] | None, NDArray[np.float32] | None]


class CodedTensor(ABC):
    """A matrix W [N, K] that an export stores as integers, with scales per block of columns:
    W = (codes - zero_points) * scales + offsets."""

    order: ir.ExternalTensor | None = None  # int32 [K], or None: column k of W is column order[k] of the codes

    @property
    @abstractmethod
    def name(self) -> str | None: ...

    @property
    @abstractmethod
    def shape(self) -> ir.Shape: ...

    @property
    @abstractmethod
    def kind(self) -> Codes: ...

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> CodedRows:
        """Codes, scales, zero points and offsets of rows, with columns in stored order."""

    def floats(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Dequantized rows of W, float32 [n, K]."""
        codes, scales, zeros, offsets = self.read(start, stop)
        block, steps = self.kind.block, codes.astype(np.float32)
        if zeros is not None:
            steps -= np.repeat(zeros, block, axis=1)
        steps *= np.repeat(scales, block, axis=1)
        if offsets is not None:
            steps += np.repeat(offsets, block, axis=1)
        return steps if self.order is None else steps[:, read_integers(self.order)]


@dataclass(frozen=True)
class DequantizedTensor(CodedTensor):
    """A matrix of integers whose parts are separate tensors, as DequantizeLinear reads them."""

    codes: ir.ExternalTensor  # int4 or int8 [N, K]
    scales: ir.ExternalTensor  # float32 [N, K / block]
    zero_points: ir.ExternalTensor | None = None  # as the codes, [N, K / block], or None
    offsets: ir.ExternalTensor | None = None  # float32 [N, K / block, 1], or None
    order: ir.ExternalTensor | None = None

    @property
    def name(self) -> str | None:
        return self.codes.name

    @property
    def shape(self) -> ir.Shape:
        return self.codes.shape

    @property
    def kind(self) -> Codes:
        bits = 4 if self.codes.dtype == ir.DataType.INT4 else 8
        block = sizes(self.codes)[1] // sizes(self.scales)[1]
        return Codes(bits, block, self.zero_points is not None, self.offsets is not None)

    def read(self, start: int = 0, stop: int | None = None) -> CodedRows:
        zeros = None if self.zero_points is None else _read_codes(self.zero_points)[start:stop]
        offsets = None if self.offsets is None else rows_of(self.offsets, start, stop)[..., 0]
        return _read_codes(self.codes, start, stop), rows_of(self.scales, start, stop), zeros, offsets


@dataclass(frozen=True)
class GgmlTensor(CodedTensor):
    """A matrix in GGML's blocks, stored in GGUF files."""

    block_type: str  # one of :data:`llmc.ggml.LAYOUTS`
    packed: ir.ExternalTensor  # uint8 [n, bytes], rows of blocks
    second: ir.ExternalTensor | None = None  # further rows of the same length, or None
    # int32 [N], stored positions of the matrix's rows; None if they are in order
    rows: ir.ExternalTensor | None = None
    # int32 [K], the places of its columns, whole blocks side by side; None where they are in order
    columns: ir.ExternalTensor | None = None

    @property
    def name(self) -> str | None:
        return self.packed.name

    @property
    def shape(self) -> ir.Shape:
        (rows, size), layout = sizes(self.packed), self._layout
        rows += 0 if self.second is None else sizes(self.second)[0]
        rows = rows if self.rows is None else sizes(self.rows)[0]
        return ir.Shape((rows, size // layout.size * layout.weights))

    @property
    def kind(self) -> Codes:
        return self._layout.kind

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.block_type]

    def read(self, start: int = 0, stop: int | None = None) -> CodedRows:
        rows, columns = sizes(self)
        start, stop, _ = slice(start, stop).indices(rows)
        spans = [(start + first, start + last) for first, last in pieces((stop - start, columns))]
        if len(spans) == 1:
            return self._read_piece(spans[0])
        groups = (stop - start, columns // self._layout.block)
        codes, scales = np.empty((stop - start, columns), np.int8), np.empty(groups, np.float32)
        offsets = np.empty(groups, np.float32) if self._layout.minima is not None else None
        for (first, last), part in zip(spans, in_parallel(self._read_piece, spans), strict=True):
            for whole, piece in zip((codes, scales, None, offsets), part, strict=True):
                if whole is not None and piece is not None:
                    whole[first - start : last - start] = piece
        return codes, scales, None, offsets

    def _read_piece(self, span: tuple[int, int]) -> CodedRows:
        packed, layout = self._read_bytes(*span), self._layout
        blocks = packed.reshape(-1, layout.size)
        with np.errstate(over="ignore", invalid="ignore"):
            codes, scales, offsets = layout.codes.read(blocks), layout.scales.read(blocks), layout.offsets(blocks)
        if not np.isfinite(scales).all() or (offsets is not None and not np.isfinite(offsets).all()):
            raise CheckpointError(
                f"{self.packed.path}: {self.name} holds NaN or infinite weights; the file is broken, download it again"
            )
        codes, scales = (array.reshape(len(packed), -1) for array in (codes, scales))
        offsets = None if offsets is None else offsets.reshape(len(packed), -1)
        if self.columns is not None:
            columns = read_integers(self.columns)
            of_scales = columns[:: layout.block] // layout.block
            codes, scales = codes[:, columns], scales[:, of_scales]
            offsets = None if offsets is None else offsets[:, of_scales]
        return codes, scales, None, offsets

    def _read_bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        places, first = self._places[start:stop], 0
        rows = np.empty((len(places), sizes(self.packed)[1]), np.uint8)
        for part in filter(None, (self.packed, self.second)):
            chosen = np.flatnonzero((first <= places) & (places < first + sizes(part)[0]))
            if len(chosen):
                local = places[chosen] - first
                raw = np.frombuffer(_rows(part, int(local.min()), int(local.max()) + 1), np.uint8)
                rows[chosen] = raw.reshape(-1, rows.shape[1])[local - local.min()]
            first += sizes(part)[0]
        return rows

    @cached_property
    def _places(self) -> NDArray[np.integer[Any]]:
        return np.arange(sizes(self)[0]) if self.rows is None else read_integers(self.rows)


Weight = ir.ExternalTensor | CodedTensor

# The largest scale exponent (plus 127) in MXFP4 for which 6, the largest value, is still a float: above it the kernel
# computes NaN, and 255 means NaN. Down to 0, 2^-127, it is exact.
MOST_EXPONENT = 252


@dataclass(frozen=True)
class Mxfp4Stack:
    """Matrices [E, N, K] that an export stores in MXFP4."""

    codes: ir.ExternalTensor  # uint8 [E, N, K / 2], E2M1, the first of two in the low half
    scales: ir.ExternalTensor  # uint8 [E, N, K / 32], exponents of two plus 127

    def read(self, tensor: ir.ExternalTensor, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """The codes or scales of matrices ``start`` to ``stop``; CheckpointError for scales that are not finite."""
        values = np.frombuffer(_rows(tensor, start, stop), np.uint8).reshape(-1, *sizes(tensor)[1:])
        if tensor is self.scales and values.max(initial=0) > MOST_EXPONENT:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} holds the exponent {values.max()}, expected at most {MOST_EXPONENT}, "
                "above which weights are not floats; the checkpoint is broken, download it again"
            )
        return values

    def matrices(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Matrices ``start`` to ``stop``, float32 [n, N, K]."""
        codes, scales = (self.read(each, start, stop) for each in (self.codes, self.scales))
        values = np.stack((codes & 15, codes >> 4), -1).reshape(*scales.shape, -1).view(ml_dtypes.float4_e2m1fn)
        factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        matrices: NDArray[np.float32] = values.astype(np.float32) * factors[..., None]
        return matrices.reshape(*codes.shape[:2], -1)


# Name suffixes of the tensors that belong to a matrix of codes, and to a matrix in GGML's blocks.
PARTS = ("scales", "zero_points", "offsets", "order")
BLOCK_PARTS = ("second", "rows", "columns")


def read_weights(folder: Path) -> dict[str, Weight | Mxfp4Stack]:
    """Every weight of an export's decoder, by its name in the checkpoint.
    Raises CheckpointError: the graph is missing or corrupt, or a weight is outside the folder or has a wrong size."""
    try:
        graph = ir.load(folder / DECODER_FILE).graph
    except (OSError, DecodeError) as error:
        raise CheckpointError(
            f"{folder / DECODER_FILE} is missing or corrupt ({error}); export the checkpoint again"
        ) from error
    values = graph.initializers.items()
    tensors = {name: it.const_value for name, it in values if isinstance(it.const_value, ir.ExternalTensor)}
    for name, tensor in tensors.items():
        _check_place(folder, name, tensor)
    types = {str(node.name).removesuffix(f".{node.op_type}"): node.op_type for node in graph if node.op_type in LAYOUTS}
    ends = tuple(f".{part}" for part in (*PARTS, *BLOCK_PARTS))
    return {name: _gather_parts(name, tensors, types) for name in tensors if not name.endswith(ends)}


def _check_place(folder: Path, name: str, tensor: ir.ExternalTensor) -> None:
    file, end = str(tensor.location), (tensor.offset or 0) + (tensor.length or 0)
    if Path(file).name != file:
        raise CheckpointError(
            f"{folder / DECODER_FILE} says that {name} is in {file!r:.80}, expected a file of this folder; export "
            "the checkpoint again"
        )
    if (file_path := find_own_file(folder, file)) is None:
        raise CheckpointError(f"{folder / file} is missing; export the checkpoint again")
    if end > (size := file_path.stat().st_size):
        raise CheckpointError(
            f"{folder / file} is truncated: it has {size} bytes, and {name} ends at {end}; export the checkpoint again"
        )
    shape, bits = sizes(tensor), int(tensor.dtype.itemsize * 8)
    if tensor.length != (wanted := -(-int(np.prod(shape, dtype=np.int64)) * bits // 8)):
        raise CheckpointError(
            f"{folder / DECODER_FILE} gives {name} {tensor.length} bytes, expected {wanted} for its shape "
            f"{list(shape)}; export the checkpoint again"
        )


def _gather_parts(name: str, found: Mapping[str, ir.ExternalTensor], types: Mapping[str, str]) -> Weight | Mxfp4Stack:
    """``types``: block types of the matrices in GGML's blocks, by name."""
    parts = {part: found[f"{name}.{part}"] for part in (*PARTS, *BLOCK_PARTS) if f"{name}.{part}" in found}
    if name in types:
        return GgmlTensor(types[name], found[name], **parts)
    if not parts:
        return found[name]
    return (Mxfp4Stack if found[name].dtype == ir.DataType.UINT8 else DequantizedTensor)(found[name], **parts)


def rows_of(tensor: Weight | Mxfp4Stack, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
    """Rows ``start`` to ``stop`` of a checkpoint's tensor [N, ...] as float32, read from its file."""
    if isinstance(tensor, Mxfp4Stack):
        return tensor.matrices(start, stop)
    if isinstance(tensor, CodedTensor):
        return tensor.floats(start, stop)
    shape = sizes(tensor)
    stop = shape[0] if stop is None else min(stop, shape[0])
    values = _to_float32(_rows(tensor, start, stop), tensor.dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} holds NaN or infinite weights between rows {start} and {stop}; "
            "the checkpoint is broken, download or save it again"
        )
    return values.reshape(stop - start, *shape[1:])


def read_integers(tensor: ir.ExternalTensor) -> NDArray[np.int32]:
    """A vector of int32, such as positions of rows or columns."""
    return np.frombuffer(_rows(tensor), np.int32)


def _read_codes(tensor: ir.ExternalTensor, start: int = 0, stop: int | None = None) -> NDArray[np.int8]:
    """Rows of 8-bit integers, or of 4-bit integers packed in pairs; rows must begin at whole bytes."""
    raw, shape = np.frombuffer(_rows(tensor, start, stop), np.int8), sizes(tensor)
    if tensor.dtype == ir.DataType.INT4:
        # Shift up and down again: a right shift of a signed number keeps its sign.
        raw = np.stack((np.left_shift(raw, 4), raw), axis=1).reshape(-1)
        raw = np.right_shift(raw, 4)[: len(raw) // shape[1] * shape[1]]
    return raw.reshape(-1, shape[1])


def _rows(tensor: ir.ExternalTensor, start: int = 0, stop: int | None = None) -> bytes:
    shape = sizes(tensor)
    stop = shape[0] if stop is None else min(stop, shape[0])
    bits = int(np.prod(shape[1:], dtype=np.int64)) * int(tensor.dtype.itemsize * 8)
    size = -(-(stop - start) * bits // 8)
    try:
        with open(tensor.path, "rb") as file:
            raw = os.pread(file.fileno(), size, (tensor.offset or 0) + start * bits // 8)
    except OSError as error:
        raise CheckpointError(
            f"{tensor.path}: cannot be read ({error.strerror}), but holds {tensor.name}; export the checkpoint again"
        ) from error
    if len(raw) != size:
        raise CheckpointError(f"{tensor.path}: ends inside {tensor.name}; the file is truncated, copy it again")
    return raw


def sizes(tensor: ir.TensorProtocol | Weight) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape.numpy())


def _to_float32(raw: bytes, dtype: ir.DataType) -> NDArray[np.float32]:
    if dtype == ir.DataType.BFLOAT16:
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT):
        return np.frombuffer(raw, dtype.numpy()).astype(np.float32)
    raise BuildError(f"weights of type {dtype.name} cannot be compiled; expected FLOAT, FLOAT16 or BFLOAT16")


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Row ranges of a matrix [N, K] of about :data:`PIECE` weights each."""
    step = max(1, PIECE // max(1, shape[1] if len(shape) > 1 else 1))
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def in_parallel(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Apply ``work`` to items on all cores (numpy releases Python's lock) and yield results in order."""
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        pending = []
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * threads:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()
