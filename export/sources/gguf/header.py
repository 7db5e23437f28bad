"""Read the header of a GGUF file: its metadata, and where each tensor's bytes are. No weight is read.

Format: ``GGUF``, a version, the numbers of tensors and of metadata, the metadata (key, type, value), the tensors (name,
dimensions with the innermost first, type, offset), and from the next multiple of ``general.alignment`` on the data.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmc.errors import CheckpointError, format_value
from llmc.export.sources.safetensors import LONGEST_NAME
from llmc.ggml import LAYOUTS
from llmc.origin import MOST_HEADER
from llmc.strict import open_regular

SUFFIX = ".gguf"
# Version 1 had counts of another size; no such file is in use.
VERSIONS = (2, 3)
# Most entries of metadata and of tensors: enough for 1024 layers of 20 tensors each.
MOST_ENTRIES = 1 << 16
# Most items of all arrays together, each a Python object: 262,144 tokens with types, scores and twice as many merges
# make 1.3 million.
MOST_ITEMS = 1 << 22
# Dimensions of a tensor, GGML_MAX_DIMS.
MOST_DIMENSIONS = 4
# Bound of a tensor's dimensions; their product is compared with the file's size.
MOST_SIZE = 1 << 40
MOST_ALIGNMENT = 1 << 20
# Weights and bytes per block of the supported types.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    **{kind: (layout.weights, layout.size) for kind, layout in LAYOUTS.items()},
}
# ggml's type names by number; errors name unsupported ones.
# fmt: off
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0", 42: "Q2_0",
}
# fmt: on
# Metadata types by number: numpy's number types; then boolean, string and array.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file: ``length`` bytes at ``offset``; ``kind`` is one of :data:`BLOCKS`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    length: int

    @property
    def row(self) -> int:
        return self.length // self.shape[0]


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a GGUF file. Arrays of numbers are numpy arrays, arrays of texts are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Entry, ...]


def read_header(path: Path) -> Header:
    """Read the header of one file and check it against the file's size."""
    try:
        with open_regular(path) as file:
            return _Reader(path, file).header()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


class _Reader:
    """Reads the parts of a header in order, never more bytes than the file has left."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._most = min(self._size, MOST_HEADER)
        self._position = 0
        self._items = 0

    def header(self) -> Header:
        self._check_kind()
        tensor_count = self._count("tensors", MOST_ENTRIES)
        entries = self._count("metadata", MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("key")
            if key in metadata:
                raise self._corrupt(f"{key} is there twice")
            metadata[key] = self._value(key, self._number("<u4"))
        tensors = [self._tensor() for _ in range(tensor_count)]
        return Header(self._path, metadata, self._place_tensors(tensors, _alignment(self._path, metadata)))

    def _check_kind(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file (it begins with {magic!r}); download it again")
        version = self._number("<u4")
        if version not in VERSIONS:
            hint = "its byte order is big-endian" if version > 0xFFFF else f"version {version}"
            raise CheckpointError(f"{self._path}: {hint}; expected GGUF version 2 or 3, convert the model again")

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("<u8")
        if count > most:
            raise self._corrupt(f"it counts {count} {what}, expected at most {most}")
        return count

    def _take(self, length: int) -> bytes:
        self._position += length
        if self._position > self._most:
            raise self._beyond()
        data = self._file.read(length)
        if len(data) != length:
            raise ValueError("it changed while it was read")
        return data

    def _texts(self, count: int) -> list[str]:
        """Read ``count`` texts in one loop: vocabularies have hundreds of thousands."""
        texts, read, position = [], self._file.read, self._position
        try:
            for _ in range(count):
                length = int.from_bytes(read(8), "little")
                position += 8 + length
                if position > self._most:
                    raise self._beyond()
                texts.append(read(length).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a text in its header is not UTF-8 ({error.reason})") from error
        if self._file.tell() != position:
            raise ValueError("it changed while it was read")
        self._position = position
        return texts

    def _beyond(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is truncated or corrupt: its header goes on beyond {self._most} of {self._size} bytes; "
            "download it again"
        )

    def _number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        number = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
        return float(str(number)) if kind == "<f4" else number.item()  # 1e-05, not the double next to it

    def _name(self, what: str) -> str:
        [name] = self._texts(1)
        if len(name) > LONGEST_NAME:
            raise self._corrupt(
                f"{name[:50]!r}... is a {what} of {len(name)} characters, expected at most {LONGEST_NAME}"
            )
        if not name.isprintable():  # messages show it
            raise self._corrupt(f"{format_value(name)} is a {what} with characters that are not printable")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return bool(self._number("<u1"))
        if kind == _STRING:
            return self._texts(1)[0]
        if kind == _ARRAY:
            return self._array(key)
        raise self._corrupt(f"{key} is of type {kind}, which GGUF does not have")

    def _array(self, key: str) -> Any:
        kind, count = self._number("<u4"), self._count(f"items of {key}", MOST_ITEMS)
        self._items += count
        if self._items > MOST_ITEMS:
            raise self._corrupt(f"its arrays hold more than {MOST_ITEMS} items")
        if kind == _STRING:
            return self._texts(count)
        if kind not in _NUMBERS and kind != _BOOL:
            raise self._corrupt(f"{key} is an array of type {kind}, expected numbers or texts")
        dtype = np.dtype(_NUMBERS.get(kind, "<u1"))
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _tensor(self) -> Entry:
        name = self._name("tensor's name")
        dimensions = self._number("<u4")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._corrupt(f"{name} has {dimensions} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        number, offset = self._number("<u4"), self._number("<u8")
        kind = _TYPES.get(number, f"number {number}")
        if kind not in BLOCKS:
            raise CheckpointError(
                f"{self._path}: tensor {name} is of type {kind}, expected one of {', '.join(BLOCKS)}; get or make a "
                "file of another quantization"
            )
        weights, size = BLOCKS[kind]
        if not all(0 < n <= MOST_SIZE for n in shape) or shape[-1] % weights:
            raise self._corrupt(
                f"{name} has shape {list(shape)}, expected sizes above 0 and rows of whole {kind} blocks"
            )
        return Entry(name, kind, shape, offset, math.prod(shape) // weights * size)

    def _place_tensors(self, tensors: list[Entry], alignment: int) -> tuple[Entry, ...]:
        """The tensors with their offsets in the file, in the header's order."""
        start = -(-self._position // alignment) * alignment
        expected, names = 0, {entry.name for entry in tensors}
        if len(names) != len(tensors):
            raise self._corrupt("two of its tensors have one name")
        for entry in tensors:
            if entry.offset != expected:
                raise self._corrupt(f"{entry.name} is at {entry.offset} of the data, expected {expected}")
            if start + entry.offset + entry.length > self._size:
                raise CheckpointError(
                    f"{self._path} is truncated: {entry.name} ends at byte {start + entry.offset + entry.length}, the "
                    f"file has {self._size}; download it again"
                )
            expected += -(-entry.length // alignment) * alignment
        return tuple(Entry(e.name, e.kind, e.shape, start + e.offset, e.length) for e in tensors)

    def _corrupt(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} has a corrupt GGUF header ({why}); download it again")


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment={alignment!r:.80} is unsupported; expected a power of two from 8 to "
            f"{MOST_ALIGNMENT}"
        )
    return alignment
