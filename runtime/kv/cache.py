"""The KV cache: rows of positions, each tensor with the shape of its own layer, whatever memory they lie in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import RequestError, UsageError
from llmc.inventory import Cache, CacheKind
from llmc.runtime.kv.budget import check_growth, next_capacity
from llmc.runtime.kv.cache_file import Form

Values = NDArray[Any]
KEPT_PLACES = 8  # numbers of positions whose layout is remembered: a block's comes again and again


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of the cache.

    Attributes:
        past, present: its names among a graph's inputs and outputs.
        kind: of its entry: ``kv`` has positions, ``state`` has none.
        shape: [kv_heads, head_dim] of one position, or the shape of one row's state.
    """

    past: str
    present: str
    kind: CacheKind
    shape: tuple[int, ...]

    def of(self, rows: int, capacity: int) -> tuple[int, ...]:
        """The shape of so many rows of so many positions."""
        if self.kind == "state":
            return (rows, *self.shape)
        heads, width = self.shape
        return (rows, heads, capacity, width)


def tensors_of(caches: Sequence[Cache]) -> tuple[CacheTensor, ...]:
    """The tensors of a decoder's caches: key and value of the first layer, of the next..."""
    found = []
    for cache in caches:
        if cache.kind == "state":
            found.append(CacheTensor(f"past_state.{cache.name}", f"present_state.{cache.name}", "state", cache.shape))
            continue
        for part in ("key", "value"):
            name = f"{cache.name}.{part}"
            found.append(CacheTensor(f"past_key_values.{name}", f"present.{name}", "kv", cache.shape))
    return tuple(found)


class Layout:
    """Layout of a row's contents in one array: tensor after tensor, of each its positions head by head, or its
    state."""

    def __init__(self, tensors: Sequence[CacheTensor]) -> None:
        self._tensors = tensors
        self._places = lru_cache(KEPT_PLACES)(self._places_of)
        self.position = sum(prod(tensor.shape) for tensor in tensors if tensor.kind == "kv")
        self.state = sum(prod(tensor.shape) for tensor in tensors if tensor.kind == "state")

    def size(self, count: int) -> int:
        """Values of ``count`` positions, and of all states."""
        return count * self.position + self.state

    def parts(self, values: Values, count: int) -> list[Values]:
        """Views of ``count`` positions' values: [kv_heads, count, head_dim] or a state, tensor by tensor."""
        return [values[start:end].reshape(shape) for start, end, shape in self._places(count)]

    def _places_of(self, count: int) -> list[tuple[int, int, tuple[int, ...]]]:
        places, start = [], 0
        for tensor in self._tensors:
            shape = tensor.of(1, count)[1:]
            places.append((start, start + prod(shape), shape))
            start += prod(shape)
        return places

    def split(self, values: Values, count: int, size: int) -> list[Values]:
        """``count`` positions in blocks of ``size``, each an array of its own."""
        whole = self.parts(values, count)
        blocks = [np.empty(self.size(size), values.dtype) for _ in range(count // size)]
        for i, block in enumerate(blocks):
            for part, mine in zip(whole, self.parts(block, size), strict=True):
                mine[...] = part[:, i * size : (i + 1) * size]
        return blocks


class KVCache(ABC):
    """Keys, values and states of the tokens before: ``rows`` times ``capacity`` positions.

    Entries of kind ``state`` hold what a row came to after its last token, and no earlier position: such a row goes on
    from there or begins anew, and is copied, read and written as a whole.

    Args:
        manifest: of the bundle; its list of caches gives the shapes, its plans and limits bound the growth.
        device_memory: bytes of the GPU's memory that the bundle may take in all; None where the cache lies in the
            process.
        forget: called before memory moves, so that nothing stays bound to it.
        guard: entered around everything that touches the memory, with what is being done.

    Attributes:
        tensors: in the order of the layers.
        dtype: of the values; bfloat16 is handed out as uint16, for which numpy has a type.
        can_rewind: whether a row may go back to any earlier position: no entry is a state.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        device_memory: int | None = None,
        forget: Callable[[], None] = lambda: None,
        guard: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
    ) -> None:
        self.tensors = tensors_of(manifest.geometry.caches)
        self.dtype: np.dtype[Any] = np.dtype("uint16" if manifest.cache == "bfloat16" else manifest.cache)
        self.device_memory = device_memory
        self.can_rewind = all(tensor.kind == "kv" for tensor in self.tensors)
        self._manifest = manifest
        self._layout = Layout(self.tensors)
        self._forget = forget
        self._guard = guard
        self._capacity = 0
        # Of each row, the positions up to the last that was ever written; with states, up to the one that they are at.
        self._written: list[int] = []

    @property
    def rows(self) -> int:
        """Rows that there are now."""
        return len(self._written)

    @property
    def capacity(self) -> int:
        """Positions that each row has now."""
        return self._capacity

    # ------------------------------------------------------------------------------------------------- growth

    def grow(self, rows: int, positions: int, most: int) -> None:
        """Make room for ``rows`` rows of ``positions`` in steps, the last of which ends at ``most``.

        Raises:
            RequestError, ResourceError, GpuError: see :meth:`reserve`.
        """
        if rows > self.rows or positions > self.capacity:
            self.reserve(rows, next_capacity(positions, most))

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow to at least ``rows`` x ``capacity``, rounded up to what the engine takes; the contents are kept.

        Raises:
            RequestError: more than the bundle was built for.
            ResourceError: memory does not suffice; the cache keeps its size.
            GpuError: the GPU failed.
        """
        limits = self._manifest.limits
        if rows > limits.max_batch or capacity > limits.max_context:  # what the engine takes may be beyond them
            raise RequestError(
                f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
                f"{limits.max_batch} x {limits.max_context}; build with larger ones"
            )
        rows, capacity = max(rows, self.rows), max(self._rounded(capacity), self._capacity)
        if (rows, capacity) == (self.rows, self._capacity):
            return
        held = self.rows, self._capacity
        check_growth(self._manifest, held, (rows, capacity), self.device_memory)
        with self._guard("growing the cache"):
            self._grow(rows, capacity)
        self._written += [0] * (rows - self.rows)
        self._capacity = capacity

    def _rounded(self, capacity: int) -> int:
        """Positions of a cache that has at least ``capacity``."""
        return capacity

    @abstractmethod
    def _grow(self, rows: int, capacity: int) -> None:
        """Move to memory of another size, with what is written; a failure changes nothing."""

    def close(self) -> None:
        """Free everything; the cache then has no rows."""
        self._written, self._capacity = [], 0

    # ------------------------------------------------------------------------------------------------- calls

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """The position after the last of ``count`` new tokens of each row, before a call that writes them.

        Raises:
            UsageError: rows or positions that there are not, or a row whose state cannot go back.
        """
        ends = [past + count for past in past_lengths]
        if first_row + len(ends) > self.rows or max(ends) > self._capacity:
            raise UsageError(
                f"rows {first_row} ... {first_row + len(ends) - 1} up to position {max(ends)} are asked for, "
                f"the cache has {self.rows} rows of {self._capacity}; reserve room first"
            )
        return ends

    def computed(self, first_row: int, ends: Sequence[int]) -> None:
        """Note that a call wrote rows up to the positions ``ends``."""
        for row, end in enumerate(ends, first_row):
            self._wrote(row, end)

    def _wrote(self, row: int, end: int) -> None:
        self._written[row] = max(self._written[row], end) if self.can_rewind else end

    def _check_state(self, row: int, position: int) -> None:
        if not self.can_rewind and position != self._written[row]:
            raise UsageError(
                f"row {row} of the cache holds a state after {self._written[row]} tokens, which cannot be had after "
                f"{position}; feed the row from its first token"
            )

    # ------------------------------------------------------------------------------------------------- contents

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Make the row ``target`` equal to ``source`` in the positions ``start`` ... ``end - 1``, and in its states.

        Raises:
            UsageError: a row or position that there is not, or a state that is not at ``end``.
            GpuError: the GPU failed.
        """
        self._check_range(source, start, end)
        self._check_range(target, start, end)
        if source == target or not end:
            return
        self._check_state(source, end)
        with self._guard("copying in the cache"):
            self._copy(source, target, start, end)
        self._wrote(target, end)

    def form(self, count: int) -> Form:
        """Shape and type of what :meth:`read` gives for ``count`` positions."""
        return (self._layout.size(count),), self.dtype

    def read(self, row: int, start: int, end: int) -> Values:
        """A copy of the positions ``start`` ... ``end - 1`` of a row and of its states: one array [values], in the
        cache's own layout.

        Raises:
            UsageError: a row or position that there is not, or a state that is not at ``end``.
            ResourceError: no memory is left.
            GpuError: the GPU failed.
        """
        self._check_range(row, start, end)
        if end:
            self._check_state(row, end)
        values = np.empty(*self.form(end - start))
        with self._guard("reading the cache"):
            self._read(row, start, end, values)
        return values

    def read_blocks(self, row: int, size: int, start: int, end: int) -> list[Values]:
        """:meth:`read` in blocks of ``size`` positions, which divides what is asked for."""
        return [self.read(row, first, first + size) for first in range(start, end, size)]

    def write(self, row: int, start: int, end: int, values: Values) -> None:
        """Put ``values``, as :meth:`read` returns them, into the positions ``start`` ... ``end - 1`` and the states.

        Raises:
            UsageError: a row or position that there is not, or values of another size or type.
            ResourceError: no memory is left.
            GpuError: the GPU failed.
        """
        self._check_range(row, start, end)
        shape, dtype = self.form(end - start)
        if values.shape != shape or values.dtype != dtype:
            raise UsageError(
                f"cache contents of {values.dtype} {list(values.shape)} are given, expected {dtype} {list(shape)} for "
                f"{end - start} positions: they come from another bundle"
            )
        with self._guard("writing the cache"):
            self._write(row, start, end, values)
        self._wrote(row, end)

    @abstractmethod
    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        """:meth:`copy` between two rows."""

    @abstractmethod
    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        """:meth:`read` into ``values``."""

    @abstractmethod
    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        """:meth:`write` of what fits."""

    def _check_range(self, row: int, start: int, end: int) -> None:
        if not (0 <= row < self.rows and 0 <= start <= end <= self._capacity):
            raise UsageError(
                f"positions {start} ... {end} of row {row} are asked for, the cache has {self.rows} rows of "
                f"{self._capacity}; reserve room first"
            )
