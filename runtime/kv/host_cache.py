"""The KV cache in the process's memory: one array for each tensor, whose addresses an engine binds."""

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ResourceError
from llmc.runtime.kv.cache import KVCache, Values


class HostCache(KVCache):
    """A :class:`KVCache` in numpy arrays. Positions that were never written take no memory.

    Attributes:
        arrays: [rows, kv_heads, capacity + spare, head_dim] or [rows, ...] for each of the ``tensors``; others after
            growth. The spare positions are those that a step may write over behind its token, of which nothing is kept.
    """

    arrays: tuple[NDArray[Any], ...] = ()

    def _grow(self, rows: int, capacity: int) -> None:
        # All of the new before anything of the old goes, so a failure changes nothing: fresh pages take no memory.
        room = [_fresh(tensor.of(rows, capacity + self._manifest.overwritten), self.dtype) for tensor in self.tensors]
        self._forget()
        before, self.arrays = list(self.arrays), tuple(room)
        kinds = [tensor.kind for tensor in self.tensors]
        while before:  # one at a time, whose old memory goes at once
            old, new, kind = before.pop(), room.pop(), kinds.pop()
            if kind == "state":
                new[: self.rows] = old
                continue
            for row, length in enumerate(self._written):
                new[row, :, :length] = old[row, :, :length]

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """See :class:`KVCache`; a row that begins anew gets empty states."""
        ends = super().begin(first_row, past_lengths, count)
        if not self.can_rewind:
            rows = list(enumerate(past_lengths, first_row))
            for row, past in rows:
                if past:
                    self._check_state(row, past)
            anew = [row for row, past in rows if not past]
            for tensor, array in zip(self.tensors, self.arrays, strict=True):
                if tensor.kind == "state":
                    array[anew] = 0
        return ends

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        for there, here in zip(self._views(target, start, end), self._views(source, start, end), strict=True):
            there[...] = here

    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        parts = self._layout.parts(values, end - start)
        for part, view in zip(parts, self._views(row, start, end), strict=True):
            part[...] = view

    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        parts = self._layout.parts(values, end - start)
        for part, view in zip(parts, self._views(row, start, end), strict=True):
            view[...] = part

    def _views(self, row: int, start: int, end: int) -> list[Values]:
        """Views of each array at these positions of a row, or at its state."""
        return [
            array[row, :, start:end] if tensor.kind == "kv" else array[row]
            for tensor, array in zip(self.tensors, self.arrays, strict=True)
        ]

    def close(self) -> None:
        """Free everything; the cache then has no rows."""
        super().close()
        self.arrays = ()


def _fresh(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros in pages that are taken when written and go back to the system with the array, which a heap may keep."""
    count = math.prod(shape)
    size = max(1, count * dtype.itemsize)
    try:
        if sys.platform == "win32":
            pages = mmap.mmap(-1, size)
        else:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(
            f"growing the cache ran out of memory ({size} bytes for one tensor); use a smaller --max-context or a "
            "smaller model"
        ) from error
    return np.frombuffer(pages, dtype, count).reshape(shape)
