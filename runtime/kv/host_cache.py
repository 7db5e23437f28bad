"""The KV cache in the process's memory: one array for each tensor, whose addresses an engine binds."""

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import ResourceError
from llmc.inventory import CacheKind
from llmc.runtime.kv.cache import KVCache, Values

LETS_GO = sys.platform == "linux"  # elsewhere pages that are given back may keep what they hold, and their memory


class HostCache(KVCache):
    """A :class:`KVCache` in numpy arrays. Positions that were never written, or were let go of, take no memory and are
    zeros.

    Attributes:
        arrays: [rows, kv_heads, capacity + spare, head_dim] or [rows, ...] for each of the ``tensors``; others after
            growth. A step may write the spare positions behind its token; nothing of them is kept.
    """

    arrays: tuple[NDArray[Any], ...] = ()
    _pages: tuple[mmap.mmap, ...] = ()  # that the arrays lie in

    def __init__(self, manifest: Manifest, **options: Any) -> None:
        super().__init__(manifest, **options)
        self._lets_go = LETS_GO and self._narrowest > 0 and self.can_rewind

    def _grow(self, rows: int, capacity: int) -> None:
        # All of the new before anything of the old goes, so a failure changes nothing: fresh pages take no memory.
        spare, small = self._manifest.overwritten, self._lets_go
        found = [
            _fresh(item.of(rows, capacity + spare), self.type_of(item), small and item.window > 0)
            for item in self.tensors
        ]
        self._forget()
        before, tensors = list(self.arrays), list(self.tensors)
        room = [array for array, _ in found]
        self.arrays, self._pages = tuple(room), tuple(pages for _, pages in found)
        found.clear()
        while before:  # one at a time, whose old memory goes at once
            old, new, tensor = before.pop(), room.pop(), tensors.pop()
            if tensor.kind == "state":
                new[: self.rows] = old
                continue
            for row, length in enumerate(self._written):
                held = slice(self._find_first_held(tensor, row), length)
                new[row, :, held] = old[row, :, held]

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """See :class:`KVCache`; a row that begins anew gets empty states."""
        ends = super().begin(first_row, past_lengths, count)
        if not self.can_rewind:
            rows = list(enumerate(past_lengths, first_row))
            for row, past in rows:
                self._check_resumable(row, past)
            anew = [row for row, past in rows if not past]
            for array in self._arrays_of("state"):
                array[anew] = 0
        return ends

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        for tensor, array in zip(self.tensors, self.arrays, strict=True):
            if tensor.kind == "state":
                array[target] = array[source]
                continue
            held = slice(max(start, self._find_first_held(tensor, source)), end)
            array[target, :, held] = array[source, :, held]

    def _swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        """A tensor at a time, so that little of both rows is held twice."""
        for tensor, array in zip(self.tensors, self.arrays, strict=True):
            if tensor.kind == "state":
                array[[one, other]] = array[[other, one]]
                continue
            mine, theirs = (
                slice(self._find_first_held(tensor, one), its_end),
                slice(self._find_first_held(tensor, other), others_end),
            )
            kept = array[one, :, mine].copy()
            array[one, :, theirs] = array[other, :, theirs]
            array[other, :, mine] = kept

    def _discard(self, row: int, end: int) -> None:
        for tensor, array, pages in zip(self.tensors, self.arrays, self._pages, strict=True):
            if tensor.window:
                held, (_, heads, capacity, _) = self._find_first_held(tensor, row), array.shape
                for head in range(row * heads, (row + 1) * heads):
                    for first, last in ((0, min(held, end)), (end, capacity)):
                        _give_back(pages, (head * capacity + first, head * capacity + last), array.strides[2])

    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        parts = self._layout.parts(values, end - start)
        for part, view in zip(parts, self._views(row, start, end), strict=True):
            part[...] = view

    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        parts = self._layout.parts(values, end - start)
        for part, view in zip(parts, self._views(row, start, end), strict=True):
            view[...] = part

    def _views(self, row: int, start: int, end: int) -> list[Values]:
        """Views of keys and values at these positions of a row."""
        return [array[row, :, start:end] for array in self._arrays_of("kv")]

    def _state_views(self, row: int) -> list[Values]:
        return [array[row] for array in self._arrays_of("state")]

    def _arrays_of(self, kind: CacheKind) -> Iterator[Values]:
        return (array for tensor, array in zip(self.tensors, self.arrays, strict=True) if tensor.kind == kind)

    def close(self) -> None:
        super().close()
        self.arrays = self._pages = ()


class LentCache(HostCache):
    """The part of another model's cache that a draft head reads, wherever that lies; nothing is written."""

    def __init__(self, manifest: Manifest, of: HostCache) -> None:
        super().__init__(manifest)
        names = [tensor.past for tensor in of.tensors]
        self._of, self._places = of, [names.index(tensor.past) for tensor in self.tensors]
        of.tell(self.close)

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """The position after each row's new tokens, which have no keys and values."""
        self.arrays = tuple(self._of.arrays[place] for place in self._places)
        return [past + count for past in past_lengths]

    def note_computed(self, first_row: int, ends: Sequence[int]) -> None:
        """Nothing was written."""


def _give_back(pages: mmap.mmap, positions: tuple[int, int], size: int) -> None:
    """Give back the whole pages among positions of ``size`` bytes each; they are zeros then."""
    first, last = -(-positions[0] * size // mmap.PAGESIZE), positions[1] * size // mmap.PAGESIZE
    if first < last:
        pages.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _fresh(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: bool) -> tuple[NDArray[Any], mmap.mmap]:
    """Zeros, and the pages that they lie in, which are taken when written; ``pieces`` may be given back one by one."""
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
    if pieces and hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge one would be taken whole again
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape(shape), pages
