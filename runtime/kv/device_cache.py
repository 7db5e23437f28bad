"""The KV cache in a GPU's memory, which engines update in place."""

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import BundleError, LlmcError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.kv.budget import round_up
from llmc.runtime.kv.cache import KVCache, Values

# Pinned memory through which positions are read and written; longer ranges go in pieces.
STAGING_BYTES = 16 * 2**20
# Kernels read whole vectors, so every tensor begins on such a boundary, as memory of cuMemAlloc does; TensorRT asks it
# of the memory that its contexts work in, too.
ALIGNMENT = 256


class DeviceCache(KVCache):
    """A :class:`KVCache` on a GPU: each tensor [rows, kv_heads, capacity, head_dim].

    Work is queued on ``stream``; only reading, writing and growing wait for it.

    Args:
        manifest: of the bundle; BundleError if a layer keeps a state.
        driver: of the GPU.
        stream: on which the engine runs, too.
        options: see :class:`KVCache`.
    """

    def __init__(self, manifest: Manifest, driver: Driver, stream: int, **options: Any) -> None:
        super().__init__(manifest, **options)
        if not self.can_rewind:
            state = next(tensor.past for tensor in self.tensors if tensor.kind == "state")
            raise BundleError(
                f"the bundle's layers keep states ({state}), which this llmc keeps on CPUs alone; build it for the cpu"
            )
        self._driver = driver
        self._stream = stream
        self._itemsize = self.dtype.itemsize
        self._block = 0
        self._starts: list[int] = []  # of each tensor in the block
        self._staging, self._staged = 0, 0

    def address(self, tensor: int, row: int) -> int:
        return self._block + self._starts[tensor] + row * self._row_size(tensor, self._capacity)

    # ------------------------------------------------------------------------------------------------ sizes

    def _position(self, tensor: int) -> int:
        """Bytes of one position of one head."""
        return self.tensors[tensor].shape[1] * self._itemsize

    def _row_size(self, tensor: int, positions: int) -> int:
        return prod(self.tensors[tensor].shape) * positions * self._itemsize

    def _places(self, rows: int, capacity: int) -> list[int]:
        """Offsets at which each tensor begins in the block, and at which the block ends."""
        starts = [0]
        for tensor in range(len(self.tensors)):
            size = rows * self._row_size(tensor, capacity)
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return starts

    def _round_capacity(self, capacity: int) -> int:
        return round_up(self._manifest.engine, capacity)

    def _grow(self, rows: int, capacity: int) -> None:
        """All of the new memory is there, zeroed, before any of the old goes: both count for a moment."""
        self._announce_move()
        *starts, size = self._places(rows, capacity)
        fresh = self._allocate(size)
        for tensor, start in enumerate(starts):
            for row, length in enumerate(self._written):
                there = fresh + start + row * self._row_size(tensor, capacity)
                self._copy_positions(tensor, (there, capacity), (self.address(tensor, row), self._capacity), length)
        self._driver.synchronize(self._stream)
        self._free()
        self._block, self._starts = fresh, starts

    def _allocate(self, size: int) -> int:
        block = self._driver.alloc(size)
        try:
            self._driver.fill(block, size, self._stream)  # a masked NaN is still a NaN
        except LlmcError:
            self._driver.free(block)
            raise
        return block

    def _free(self) -> None:
        block, self._block = self._block, 0
        if block:
            self._driver.free(block)

    def close(self) -> None:
        super().close()
        self._free()
        if self._staging:
            self._driver.free_host(self._staging)
        self._staging, self._staged = 0, 0

    # --------------------------------------------------------------------------------------------- contents

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        for tensor in range(len(self.tensors)):
            offset = start * self._position(tensor)
            here, there = self.address(tensor, source) + offset, self.address(tensor, target) + offset
            self._copy_positions(tensor, (there, self._capacity), (here, self._capacity), end - start)

    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        for first, last in self._pieces(start, end):
            for tensor, (staged, _) in enumerate(self._stage_parts(values, start, end, first, last)):
                there, here = staged.ctypes.data, self.address(tensor, row) + first * self._position(tensor)
                self._copy_positions(tensor, (there, last - first), (here, self._capacity), last - first)
            self._driver.synchronize(self._stream)
            for staged, part in self._stage_parts(values, start, end, first, last):
                part[...] = staged

    def read_blocks(self, row: int, size: int, start: int, end: int) -> list[Values]:
        """:meth:`read` in blocks of ``size`` positions; the device is waited for once."""
        return self._layout.split(self.read(row, start, end), end - start, size)

    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        for first, last in self._pieces(start, end):
            for tensor, (staged, part) in enumerate(self._stage_parts(values, start, end, first, last)):
                staged[...] = part
                there, here = self.address(tensor, row) + first * self._position(tensor), staged.ctypes.data
                self._copy_positions(tensor, (there, self._capacity), (here, last - first), last - first)
            self._driver.synchronize(self._stream)

    def _copy_positions(self, tensor: int, target: tuple[int, int], source: tuple[int, int], count: int) -> None:
        """Copy ``count`` positions of every head between two addresses, each with the room that a head has there."""
        if count:
            position, heads = self._position(tensor), self.tensors[tensor].shape[0]
            (there, theirs), (here, ours) = target, source
            self._driver.copy_2d(there, theirs * position, here, ours * position, count * position, heads, self._stream)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        step = max(1, STAGING_BYTES // (self._layout.size(1) * self._itemsize))
        for first in range(start, end, step):
            yield first, min(first + step, end)

    def _stage_parts(
        self, values: Values, start: int, end: int, first: int, last: int
    ) -> Iterator[tuple[Values, Values]]:
        """Per tensor: pinned memory for the positions ``first`` ... ``last - 1``, and a view of them in ``values``, of
        the positions ``start`` ... ``end - 1``."""
        size = self._layout.size(last - first)
        if size * self._itemsize > self._staged:
            fresh = self._driver.alloc_host(size * self._itemsize)
            if self._staging:
                self._driver.free_host(self._staging)
            self._staging, self._staged = fresh, size * self._itemsize
        staged = self._layout.parts(host_array(self._staging, (size,), self.dtype), last - first)
        for mine, part in zip(staged, self._layout.parts(values, end - start), strict=True):
            yield mine, part[:, first - start : last - start]


def host_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Host memory as an array, which must not outlive it."""
    count = int(np.prod(shape, dtype=np.int64))
    memory: Any = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype, count).reshape(shape)
