"""The weight file of a bundle: packed tensors, appended to one file."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle import WEIGHTS_FILE

# A page: engines map each tensor on its own, and a mapping begins on a page.
ALIGNMENT = 4096


def get_stored_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """A contiguous array as ONNX stores it: two values of 4 bits in a byte, the first one in its low half."""
    values: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    if array.dtype != ml_dtypes.int4:
        return values
    halves = np.append(values, np.uint8(0)) if len(values) % 2 else values
    packed: NDArray[np.uint8] = np.bitwise_or(halves[0::2] & np.uint8(15), halves[1::2] << np.uint8(4))
    return packed


def round_to_bfloat16(folder: Path) -> None:
    """Round all float32 weights in the weight file of ``folder`` to the nearest bfloat16, ties to even, in place."""
    model = ir.load(next(folder.glob("*.onnx")))
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.dtype == ir.DataType.FLOAT and tensor.length:
                data = np.memmap(file, np.uint32, "r+", tensor.offset or 0, (tensor.length // 4,))
                data += 0x7FFF + ((data >> 16) & 1)
                data &= 0xFFFF0000
                data.flush()


class WeightFile:
    """The bundle's weight file: tensors are appended once under a name and handed out as external tensors.

    Graphs that ask for the same name share the bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, ir.ExternalTensor] = {}
        self._sources: dict[str, bytes] = {}
        self._file = (folder / WEIGHTS_FILE).open("wb")

    def add(
        self, names: Sequence[str], make: Callable[[], Sequence[NDArray[Any]]], source: bytes = b""
    ) -> list[ir.ExternalTensor]:
        """The tensors called ``names``; ``make`` computes them all and is called only if the first is not there yet.

        ``source`` identifies what they are computed from, if the name does not: a name stands for one content.
        """
        assert self._sources.setdefault(names[0], source) == source, f"{names[0]} is computed from two sources"
        if names[0] not in self._tensors:
            for name, array in zip(names, make(), strict=True):
                self._append(name, np.ascontiguousarray(array))
        return [self._tensors[name] for name in names]

    def view(self, tensor: ir.ExternalTensor, shape: Sequence[int], part: int = 0) -> ir.ExternalTensor:
        """The same bytes in another shape, as an operator wants them, or the bytes of one part of a stack."""
        name, length = f"{tensor.name}.{'x'.join(map(str, shape))}", int(prod(shape) * tensor.dtype.itemsize)
        name += f".{part}" if length < (tensor.length or 0) else ""
        return self._reference(name, (tensor.offset or 0) + part * length, length, tensor.dtype, shape)

    def copy(self, tensor: ir.ExternalTensor) -> ir.ExternalTensor:
        """A tensor of another file, whose bytes are appended once, in whatever shapes graphs read them."""
        name, length = f"{tensor.offset}.{tensor.length}", tensor.length or 0
        [whole] = self.add([name], lambda: [np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, (length,))])
        shape = [size for size in tensor.shape if isinstance(size, int)]
        return self._reference(tensor.name or name, whole.offset or 0, length, tensor.dtype, shape)

    def close(self) -> None:
        self._file.close()

    def _append(self, name: str, array: NDArray[Any]) -> None:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset, data = self._file.tell(), get_stored_bytes(array)
        self._file.write(data.data)
        dtype = ir.DataType.from_numpy(array.dtype)
        self._tensors[name] = self._reference(name, offset, data.nbytes, dtype, array.shape)

    def _reference(
        self, name: str, offset: int, length: int, dtype: ir.DataType, shape: Sequence[int]
    ) -> ir.ExternalTensor:
        return ir.ExternalTensor(
            WEIGHTS_FILE, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self.folder
        )
