"""The KV cache in the process's memory: one array for each tensor, whose addresses an engine binds."""

import logging
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.bundle.model.cache import CacheKind
from llmc.runtime.kv.cache import CacheTensor, KVCache, Values
from llmc.runtime.kv.pages import Pages, map_fresh, whole_pages

log = logging.getLogger(__name__)
LETS_GO = sys.platform == "linux"  # elsewhere pages that are given back may keep what they hold, and their memory


class HostCache(KVCache):
    """A :class:`KVCache` in numpy arrays. Positions that were never written, or were let go of, take no memory.

    On Linux the arrays lie in :class:`Pages`: growth and moves copy nothing, and rows that begin alike share memory.
    Elsewhere contents are copied.
    """

    # [rows, kv_heads, capacity + spare, head_dim] or [rows, ...] for each of the `tensors`, or larger; others after
    # growth. A step may write the spare positions behind its token; nothing of them is kept.
    arrays: tuple[NDArray[Any], ...] = ()
    _memory: Sequence[mmap.mmap] = ()  # of arrays that are in no pages
    _pages: Pages | None = None

    def __init__(self, manifest: Manifest, **options: Any) -> None:
        super().__init__(manifest, **options)
        self._lets_go = LETS_GO and self._narrowest > 0 and self.can_rewind

    def _grow(self, rows: int, capacity: int) -> None:
        # All of the new before anything of the old goes, so a failure changes nothing: fresh pages take no memory.
        spare, small = self._manifest.overwritten, self._lets_go
        if not self.arrays:
            self._pages = self._open_pages()
        copied = [item for item in self.tensors if item.kind == "state" or self._pages is None]
        found = {
            item: _fresh(item.of(rows, capacity + spare), self.type_of(item), small and item.window > 0)
            for item in copied
        }
        mapped = iter(() if self._pages is None else self._pages.resize(rows, capacity + spare))
        self._announce_move()
        before, tensors = list(self.arrays), list(self.tensors)
        room = [found[item][0] if item in found else next(mapped) for item in tensors]
        self._memory = [found[item][1] for item in copied]
        self.arrays = tuple(room)
        found.clear()
        while before:  # one at a time, whose old memory goes at once
            old, new, tensor = before.pop(), room.pop(), tensors.pop()
            if tensor.kind == "state":
                new[: self.rows] = old
            for row, length in enumerate(self._written if self._pages is None and tensor.kind == "kv" else ()):
                held = slice(self._find_first_held(tensor, row), length)
                new[row, :, held] = old[row, :, held]

    def _open_pages(self) -> Pages | None:
        if self._manifest.target.name != "cpu":  # an emulated graph's tables end with the context; pages end later
            return None
        shapes, limits = [item.shape for item in self.tensors if item.kind == "kv"], self._manifest.limits
        most = limits.max_context + self._manifest.overwritten
        try:
            return Pages(shapes, self.dtype, limits.max_batch, most) if shapes else None
        except OSError as error:
            log.info("rows of the cache are copied and share no memory: %s", error)
            return None

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

    def _prepare(self, row: int, start: int) -> None:
        super()._prepare(row, start)
        if self._pages is not None and start < self._pages.shares(row):
            first = max(0, start - self._pages.span)  # before the page that is written next
            kept = np.empty(*self.form(start - first))
            self._read(row, first, start, kept)
            self._pages.renew(row, start)
            self._write(row, first, start, kept)

    def release(self, row: int) -> None:
        """See :class:`KVCache`; its memory is given back."""
        if self._pages is not None:
            self._pages.release(row)

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        if self._pages is not None and not start:
            self._pages.share(source, target, end)
        for number, (tensor, array) in enumerate(self._list_of("kv")):
            first = max(start, self._find_first_held(tensor, source))
            if self._pages is not None:
                first = max(first, self._pages.first_unshared(number, target))
            array[target, :, first:end] = array[source, :, first:end]

    def _swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        if self._pages is None:
            super()._swap(one, its_end, other, others_end)
        else:
            self._pages.exchange(one, other)

    def _discard(self, row: int, end: int) -> None:
        for number, (tensor, array) in enumerate(self._list_of("kv")):
            if tensor.window:
                held, (_, heads, capacity, _) = self._find_first_held(tensor, row), array.shape
                for first, last in ((0, min(held, end)), (end, capacity)):
                    if self._pages is not None:
                        self._pages.give_back(number, row, first, last)
                        continue
                    for start in range(row * heads * capacity, (row + 1) * heads * capacity, capacity):
                        begin, stop = whole_pages((start + first) * array.strides[2], (start + last) * array.strides[2])
                        if begin < stop:  # they are zeros then
                            self._memory[number].madvise(mmap.MADV_DONTNEED, begin, stop - begin)

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
        return (array for _, array in self._list_of(kind))

    def _list_of(self, kind: CacheKind) -> Iterator[tuple[CacheTensor, Values]]:
        return (pair for pair in zip(self.tensors, self.arrays, strict=True) if pair[0].kind == kind)

    def close(self) -> None:
        super().close()
        self.arrays, self._memory, self._pages = (), (), None


class LentCache(HostCache):
    """The part of another model's cache that a draft head reads, wherever that lies; nothing is written."""

    def __init__(self, manifest: Manifest, of: HostCache) -> None:
        super().__init__(manifest)
        names = [tensor.past for tensor in of.tensors]
        self._of, self._places = of, [names.index(tensor.past) for tensor in self.tensors]
        of.on_move.append(self.close)

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """The position after each row's new tokens, which have no keys and values."""
        self.arrays = tuple(self._of.arrays[place] for place in self._places)
        return [past + count for past in past_lengths]

    def note_computed(self, first_row: int, ends: Sequence[int]) -> None:
        """Nothing was written."""


def _fresh(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: bool) -> tuple[NDArray[Any], mmap.mmap]:
    """Zeros, and the pages that they lie in, which are taken when written; ``pieces`` may be given back one by one."""
    count = math.prod(shape)
    pages = map_fresh(max(1, count * dtype.itemsize))
    if pieces and hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge one would be taken whole again
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape(shape), pages
