"""Keys and values in a GPU's memory: rows x capacity, where an engine updates them in place or beside each other."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Geometry
from llmc.errors import LlmcError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.sessions.base import check_range, contents_end, kept_positions

# Of pinned memory through which positions are read and written; longer ranges go in pieces.
STAGING_BYTES = 16 * 2**20
# Kernels read whole vectors, so every tensor begins on such a boundary, as memory of cuMemAlloc does.
ALIGNMENT = 256
TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.float16), 4: np.dtype(np.float32)}


class DeviceCache:
    """Keys and values [rows, kv_heads, capacity, head_dim] of every layer on the device.

    With two buffers the engine reads from one and writes all of its call's rows to the other, so each row remembers
    which one holds it. Work is queued on ``stream``; only reading, writing and resizing wait for it.

    Args:
        driver: of the GPU.
        geometry: of the decoder.
        itemsize: bytes of a value.
        stream: on which the engine runs, too.
        buffers: 1 where the engine updates the cache in place, 2 where it writes to another place.
        dtype: of the arrays that are read and written; default: float16 for 2 bytes, float32 for 4, int8 for 1.
            Give uint16 for bfloat16, for which numpy has no type.
    """

    def __init__(
        self,
        driver: Driver,
        geometry: Geometry,
        itemsize: int,
        stream: int,
        buffers: int = 1,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self._driver = driver
        self._stream = stream
        self.tensors = 2 * geometry.layers
        self._heads, self._head_dim = geometry.kv_heads, geometry.head_dim
        self._position = geometry.head_dim * itemsize  # bytes of one position of one head
        self.dtype: np.dtype[Any] = TYPES[itemsize] if dtype is None else dtype
        self._blocks = [0] * buffers
        self._capacity = 0
        self._written: list[int] = []  # of each row, the positions up to the last that was ever written
        self._side: list[int] = []  # of each row, the buffer that holds it
        self._staging, self._staged = 0, 0

    @property
    def rows(self) -> int:
        """Rows that the cache holds now."""
        return len(self._written)

    @property
    def capacity(self) -> int:
        """Positions that the cache holds now, per row."""
        return self._capacity

    @property
    def written(self) -> tuple[int, ...]:
        """Of each row, the positions up to the last that was ever written."""
        return tuple(self._written)

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return len(self._blocks) * self._block_size(self.rows, self._capacity)

    def address(self, tensor: int, row: int) -> int:
        """Where a row of a tensor begins (keys and values of the first layer, of the next...), in its buffer."""
        return self._address(tensor, row, self._side[row])

    def other_address(self, tensor: int, row: int) -> int:
        """Where the engine shall write the row: the other buffer, or the same where it updates in place."""
        return self._address(tensor, row, (self._side[row] + 1) % len(self._blocks))

    def _address(self, tensor: int, row: int, side: int) -> int:
        return self._blocks[side] + tensor * self._tensor_size(self.rows, self._capacity) + row * self._row_size()

    def side(self, first_row: int, rows: int) -> int:
        """Bring rows into one buffer, moving the fewer, and say which one it is: 0 or 1."""
        sides = self._side[first_row : first_row + rows]
        side = int(2 * sum(sides) > len(sides))
        for row in range(first_row, first_row + rows):
            if self._side[row] != side:
                self._move(row, side)
        return side

    def _move(self, row: int, side: int) -> None:
        for tensor in range(self.tensors):
            here, there = self.address(tensor, row), self._address(tensor, row, side)
            self._copy_positions(there, self._pitch(), here, self._pitch(), self._written[row])
        self._side[row] = side

    def computed(self, first_row: int, ends: Sequence[int]) -> None:
        """Note that a call was queued which writes rows up to the positions ``ends``, to their other buffer."""
        for row, end in enumerate(ends, first_row):
            self._written[row] = max(self._written[row], end)
            self._side[row] = (self._side[row] + 1) % len(self._blocks)

    # ------------------------------------------------------------------------------------------------ sizes

    def _pitch(self) -> int:
        return self._capacity * self._position

    def _row_size(self) -> int:
        return self._heads * self._pitch()

    def _tensor_size(self, rows: int, capacity: int) -> int:
        size = rows * self._heads * capacity * self._position
        return -(-size // ALIGNMENT) * ALIGNMENT

    def _block_size(self, rows: int, capacity: int) -> int:
        return self.tensors * self._tensor_size(rows, capacity)

    def resize(self, rows: int, capacity: int, used: Sequence[int] | None = None) -> None:
        """Make the cache exactly ``rows`` x ``capacity``; see :class:`llmc.runtime.sessions.base.Session`.

        All of the new memory is there, zeroed, before any of the old goes: both count for a moment.

        Raises:
            UsageError: ``used`` does not have one number for each row of the cache.
            ResourceError: memory does not suffice; the cache keeps its size.
        """
        known = kept_positions(self._written, used)
        if (rows, capacity, known) == (self.rows, self._capacity, self._written):
            return
        kept = [min(length, capacity) for length in known[:rows]]
        fresh = self._allocate(self._block_size(rows, capacity))
        self._carry(fresh[0], rows, capacity, kept)
        self._driver.synchronize(self._stream)
        self._free_blocks(self._blocks)
        self._blocks, self._capacity = fresh, capacity
        self._written = kept + [0] * (rows - len(kept))
        self._side = [0] * rows

    def _allocate(self, size: int) -> list[int]:
        blocks = [0] * len(self._blocks)
        try:
            for i in range(len(blocks) if size else 0):
                blocks[i] = self._driver.alloc(size)
                self._driver.fill(blocks[i], size, self._stream)  # a masked NaN is still a NaN
        except LlmcError:
            self._free_blocks(blocks)
            raise
        return blocks

    def _carry(self, block: int, rows: int, capacity: int, kept: Sequence[int]) -> None:
        pitch, size = capacity * self._position, self._tensor_size(rows, capacity)
        for tensor in range(self.tensors):
            for row, length in enumerate(kept):
                target = block + tensor * size + row * self._heads * pitch
                self._copy_positions(target, pitch, self.address(tensor, row), self._pitch(), length)

    def _free_blocks(self, blocks: list[int]) -> None:
        for i, block in enumerate(blocks):
            blocks[i] = 0
            if block:
                self._driver.free(block)

    def close(self) -> None:
        """Free everything; the cache then has no rows."""
        self._free_blocks(self._blocks)
        if self._staging:
            self._driver.free_host(self._staging)
        self._staging, self._staged = 0, 0
        self._written, self._side, self._capacity = [], [], 0

    # --------------------------------------------------------------------------------------------- contents

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions ``start`` ... ``end - 1`` of the row ``source`` to the same ones of ``target``.

        Raises:
            UsageError: a row or position that the cache does not have.
        """
        self._check_range(source, start, end)
        self._check_range(target, start, end)
        if source == target:
            return
        offset = start * self._position
        for tensor in range(self.tensors):
            here, there = self.address(tensor, source) + offset, self.address(tensor, target) + offset
            self._copy_positions(there, self._pitch(), here, self._pitch(), end - start)
        self._written[target] = max(self._written[target], end)

    def read(self, row: int, start: int, end: int) -> NDArray[Any]:
        """A copy of keys and values [2 * layers, kv_heads, end - start, head_dim] of positions of a row.

        Raises:
            UsageError: a row or position that the cache does not have.
            ResourceError: no pinned memory is left.
        """
        self._check_range(row, start, end)
        values = np.empty((self.tensors, self._heads, end - start, self._head_dim), self.dtype)
        for first, last in self._pieces(start, end):
            staged = self._stage(last - first)
            for tensor, place in enumerate(self._places(last - first)):
                source = self.address(tensor, row) + first * self._position
                self._copy_positions(place, (last - first) * self._position, source, self._pitch(), last - first)
            self._driver.synchronize(self._stream)
            values[:, :, first - start : last - start] = staged
        return values

    def write(self, row: int, start: int, values: NDArray[Any]) -> None:
        """Put ``values``, as :meth:`read` returns them, into the positions from ``start`` on.

        Raises:
            UsageError: a row or position that the cache does not have, or values of another shape or type.
            ResourceError: no pinned memory is left.
        """
        end = contents_end(start, values, (self.tensors, self._heads, self._head_dim), self.dtype)
        self._check_range(row, start, end)
        for first, last in self._pieces(start, end):
            self._stage(last - first)[:] = values[:, :, first - start : last - start]
            for tensor, place in enumerate(self._places(last - first)):
                target = self.address(tensor, row) + first * self._position
                self._copy_positions(target, self._pitch(), place, (last - first) * self._position, last - first)
            self._driver.synchronize(self._stream)
        self._written[row] = max(self._written[row], end)

    def _copy_positions(self, target: int, target_pitch: int, source: int, source_pitch: int, count: int) -> None:
        """Copy ``count`` positions of every head."""
        if count:
            width = count * self._position
            self._driver.copy_2d(target, target_pitch, source, source_pitch, width, self._heads, self._stream)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        step = max(1, STAGING_BYTES // (self.tensors * self._heads * self._position))
        for first in range(start, end, step):
            yield first, min(first + step, end)

    def _stage(self, count: int) -> NDArray[Any]:
        """Pinned memory for ``count`` positions, as an array like those that are read and written."""
        shape = (self.tensors, self._heads, count, self._head_dim)
        size = self.tensors * self._heads * count * self._position
        if size > self._staged:
            fresh = self._driver.alloc_host(size)
            if self._staging:
                self._driver.free_host(self._staging)
            self._staging, self._staged = fresh, size
        return host_array(self._staging, shape, self.dtype)

    def _places(self, count: int) -> range:
        """Where each tensor's positions lie in the pinned memory."""
        step = self._heads * count * self._position
        return range(self._staging, self._staging + self.tensors * step, step)

    def _check_range(self, row: int, start: int, end: int) -> None:
        check_range(row, start, end, self.rows, self._capacity)


def host_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Host memory as an array, which must not outlive it."""
    count = int(np.prod(shape, dtype=np.int64))
    memory: Any = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype, count).reshape(shape)
