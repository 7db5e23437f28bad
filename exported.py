"""The weights of an export, read by rows: its graph says where each of them lies."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from llmc.bundle import DECODER_FILE
from llmc.errors import BuildError, CheckpointError
from llmc.inventory import Codes
from llmc.origin import find_own_file, weight_files

S = TypeVar("S")
T = TypeVar("T")

# Weights per piece: small enough to stay in the second-level cache as float32 (1 MiB), large enough to amortise a call.
PIECE = 1 << 18


def weights_identity(export: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change (ns) of each weight file of an export, for keys of what is computed from them."""
    found = ((path.name, path.stat()) for path in weight_files(export))
    return [(name, info.st_size, info.st_mtime_ns) for name, info in found]


@dataclass(frozen=True)
class CodedTensor:
    """A matrix W [N, K] that an export holds as integers, by blocks of columns:
    W = (codes - zero_points) * scales + offsets.

    Attributes:
        codes: int4 or int8 [N, K].
        scales: float32 [N, K / block].
        zero_points: as the codes, [N, K / block], or None.
        offsets: float32 [N, K / block, 1], or None.
        order: int32 [K], or None: column k of W is column order[k] of the codes.
    """

    codes: ir.ExternalTensor
    scales: ir.ExternalTensor
    zero_points: ir.ExternalTensor | None = None
    offsets: ir.ExternalTensor | None = None
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
        return Codes(bits, self.block, self.zero_points is not None, self.offsets is not None)

    @property
    def block(self) -> int:
        """Columns that share a scale."""
        return sizes(self.codes)[1] // sizes(self.scales)[1]


Weight = ir.ExternalTensor | CodedTensor

# The largest exponent (plus 127) of a scale in MXFP4 with which 6, its largest value, is a float: of more the kernel
# makes NaN, and 255 is none. Down to 0, 2^-127, it is exact.
MOST_EXPONENT = 252


@dataclass(frozen=True)
class Mxfp4Stack:
    """Matrices [E, N, K] that an export holds in MXFP4.

    Attributes:
        codes: uint8 [E, N, K / 2], E2M1, the first of two in the low half.
        scales: uint8 [E, N, K / 32], exponents of two with 127 added.
    """

    codes: ir.ExternalTensor
    scales: ir.ExternalTensor

    def read(self, tensor: ir.ExternalTensor, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """The codes or scales of matrices ``start`` to ``stop``; CheckpointError for scales that are no floats."""
        found = np.frombuffer(_rows(tensor, start, stop), np.uint8).reshape(-1, *sizes(tensor)[1:])
        if tensor is self.scales and found.max(initial=0) > MOST_EXPONENT:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} holds the exponent {found.max()}, expected at most {MOST_EXPONENT}, "
                "beyond which weights are no floats; the checkpoint is broken, get it again"
            )
        return found

    def matrices(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Matrices ``start`` to ``stop``, float32 [n, N, K]."""
        codes, scales = (self.read(each, start, stop) for each in (self.codes, self.scales))
        values = np.stack((codes & 15, codes >> 4), -1).reshape(*scales.shape, -1).view(ml_dtypes.float4_e2m1fn)
        factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        found: NDArray[np.float32] = values.astype(np.float32) * factors[..., None]
        return found.reshape(*codes.shape[:2], -1)


# Ends of the names of what scales a matrix of codes.
PARTS = ("scales", "zero_points", "offsets", "order")


def read_weights(folder: Path) -> dict[str, Weight | Mxfp4Stack]:
    """Every weight of an export's decoder, by its name in the checkpoint.
    Raises CheckpointError: the graph is missing or corrupt, or a weight lies elsewhere, or is not of its shape."""
    try:
        values = ir.load(folder / DECODER_FILE).graph.initializers.values()
    except (OSError, DecodeError) as error:
        raise CheckpointError(
            f"{folder / DECODER_FILE} is missing or corrupt ({error}); export the checkpoint again"
        ) from error
    found = {str(it.name): it.const_value for it in values if isinstance(it.const_value, ir.ExternalTensor)}
    for name, tensor in found.items():
        _check_place(folder, name, tensor)
    return {name: _gather_parts(name, found) for name in found if not name.endswith(tuple(f".{it}" for it in PARTS))}


def _check_place(folder: Path, name: str, tensor: ir.ExternalTensor) -> None:
    file, end = str(tensor.location), (tensor.offset or 0) + (tensor.length or 0)
    if Path(file).name != file:
        raise CheckpointError(
            f"{folder / DECODER_FILE} says that {name} lies in {file!r:.80}, expected a file of this folder; export "
            "the checkpoint again"
        )
    if (place := find_own_file(folder, file)) is None:
        raise CheckpointError(f"{folder / file} is missing; export the checkpoint again")
    if end > (size := place.stat().st_size):
        raise CheckpointError(
            f"{folder / file} is truncated: it has {size} bytes, and {name} ends at {end}; export the checkpoint again"
        )
    shape, bits = sizes(tensor), int(tensor.dtype.itemsize * 8)
    if tensor.length != (wanted := -(-int(np.prod(shape, dtype=np.int64)) * bits // 8)):
        raise CheckpointError(
            f"{folder / DECODER_FILE} gives {name} {tensor.length} bytes, expected {wanted} for its shape "
            f"{list(shape)}; export the checkpoint again"
        )


def _gather_parts(name: str, found: Mapping[str, ir.ExternalTensor]) -> Weight | Mxfp4Stack:
    parts = {part: found[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in found}
    if not parts:
        return found[name]
    return (Mxfp4Stack if found[name].dtype == ir.DataType.UINT8 else CodedTensor)(found[name], **parts)


def rows_of(tensor: Weight | Mxfp4Stack, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
    """Rows ``start`` to ``stop`` of a checkpoint's tensor [N, ...] as float32, read from its file."""
    if isinstance(tensor, Mxfp4Stack):
        return tensor.matrices(start, stop)
    if isinstance(tensor, CodedTensor):
        codes, scales, zeros, offsets = codes_of(tensor, start, stop)
        steps = codes.astype(np.float32)
        if zeros is not None:
            steps -= np.repeat(zeros, tensor.block, axis=1)
        steps *= np.repeat(scales, tensor.block, axis=1)
        if offsets is not None:
            steps += np.repeat(offsets, tensor.block, axis=1)
        return steps if tensor.order is None else steps[:, order_of(tensor.order)]
    shape = sizes(tensor)
    stop = shape[0] if stop is None else min(stop, shape[0])
    values = _to_float32(_rows(tensor, start, stop), tensor.dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} holds NaN or infinite weights between rows {start} and {stop}; "
            "the checkpoint is broken, get or save it again"
        )
    return values.reshape(stop - start, *shape[1:])


def codes_of(
    tensor: CodedTensor, start: int = 0, stop: int | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int8] | None, NDArray[np.float32] | None]:
    """Codes [n, K], scales [n, groups], zero points and offsets of a matrix's rows, its columns as they are stored."""
    zeros = None if tensor.zero_points is None else _integers(tensor.zero_points)[start:stop]
    offsets = None if tensor.offsets is None else rows_of(tensor.offsets, start, stop)[..., 0]
    return _integers(tensor.codes, start, stop), rows_of(tensor.scales, start, stop), zeros, offsets


def order_of(order: ir.ExternalTensor) -> NDArray[np.int32]:
    """Places of the columns among the codes, see :class:`CodedTensor`."""
    return np.frombuffer(_rows(order), np.int32)


def _integers(tensor: ir.ExternalTensor, start: int = 0, stop: int | None = None) -> NDArray[np.int8]:
    """Rows of integers of 8 bits, or of 4, of which two lie in a byte; rows that begin in one take them all."""
    raw, shape = np.frombuffer(_rows(tensor, start, stop), np.int8), sizes(tensor)
    if tensor.dtype == ir.DataType.INT4:
        # Up and down again: a shift of a signed number keeps its sign.
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
            f"{tensor.path}: cannot be read ({error.strerror}), yet holds {tensor.name}; export the checkpoint again"
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
    """Apply ``work`` to items on all cores (numpy releases the interpreter lock) and yield results in order."""
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        pending = []
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * threads:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()
