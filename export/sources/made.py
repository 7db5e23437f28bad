"""Converted tensors, which an export writes into its own file."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import MADE_FILE
from llmc.errors import require
from llmc.export.sources.safetensors import ITEM_BITS, StoredTensor

ARRAY_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "I4": "uint8",  # two per byte
    "U8": "uint8",
}


def array_type(dtype: str) -> np.dtype[Any]:
    name = ARRAY_TYPES[dtype]
    return np.dtype(getattr(require("ml_dtypes", "build"), name) if name.startswith(("b", "float8")) else name)


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that is computed piece by piece while the export is written."""

    dtype: str  # one of :data:`ARRAY_TYPES`
    shape: tuple[int, ...]  # of the whole tensor
    pieces: Callable[[], Iterator[NDArray[Any]]]  # yields consecutive pieces of its rows, in that type

    @property
    def nbytes(self) -> int:
        return (math.prod(self.shape) * ITEM_BITS[self.dtype] + 7) // 8


def write_made(tensors: Mapping[str, StoredTensor | MadeTensor], folder: Path) -> tuple[dict[str, StoredTensor], int]:
    """Write the converted tensors into ``folder``; return each tensor's location, and the number of new bytes."""
    places = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, StoredTensor)}
    made = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, MadeTensor)}
    if not made:
        return places, 0
    with (folder / MADE_FILE).open("wb") as file:
        for name, tensor in made.items():
            start, wanted = file.tell(), array_type(tensor.dtype)
            for piece in tensor.pieces():
                assert piece.dtype == wanted, f"{name} is made as {piece.dtype}, not as {wanted}"
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
            places[name] = StoredTensor(MADE_FILE, start, file.tell() - start, tensor.dtype, tensor.shape)
            assert places[name].length == tensor.nbytes, f"{name}: {places[name].length} of {tensor.nbytes} bytes"
        new_bytes = file.tell()
    return {name: places[name] for name in tensors}, new_bytes
