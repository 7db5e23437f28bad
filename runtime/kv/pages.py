"""Pages of the host's cache that rows share: PagedAttention, with the processor's page tables as block tables.

Microsoft's vAttention does the same on GPUs (https://arxiv.org/abs/2405.04437).
"""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ResourceError

MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
SHARED, PRIVATE, FIXED, NO_RESERVE = 1, 2, 16, 0x4000  # Linux's flags of mmap
PUNCH_HOLE = 1 | 2  # Linux's flags of fallocate: keep the size, free the pages
# Part of a process's mappings that its caches may take at rest: growth maps everything once more before the old goes.
PART_OF_MAPPINGS = 4


class _Tensor(NamedTuple):
    """A tensor's part of the file: where it starts, heads of a row, values of a position, bytes of a head and of a
    head's position."""

    start: int
    heads: int
    values: int
    size: int
    width: int

    def list_heads(self, slot: int) -> range:
        start = self.start + slot * self.heads * self.size
        return range(start, start + self.heads * self.size, self.size)


class _View(NamedTuple):
    """Addresses at which a tensor's rows lie: the first one, and bytes from head to head."""

    address: int
    stride: int


class Pages:
    """Tensors [rows, heads, positions, values] whose pages lie in a sparse file in memory, which has two slots for each
    row at the longest context. Addresses grow; pages stay where they are and are mapped there.

    A row writes its own slot. Pages that rows have in common lie in the slot of one of them, are mapped privately by
    all of them and never written again. Pages that were never written take no memory.

    Args:
        shapes: heads and values of each tensor.
        rows, positions: the most that there will be.

    Raises:
        OSError: the system has no such file, or too few mappings.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: "np.dtype[Any]", rows: int, positions: int) -> None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            raise OSError("this is not Linux, or a Python without memfd_create")
        self._mappings = 2 * rows * sum(heads for heads, _ in shapes)
        needed = self._mappings + sum(other._mappings for other in _LIVING)
        if needed > int(MAX_MAPPINGS.read_text()) // PART_OF_MAPPINGS:
            raise OSError(f"caches may then take {needed} mappings, too large a part of vm.max_map_count")
        self._dtype, self._tensors, end = dtype, list[_Tensor](), 0
        # Positions that fill whole pages of every tensor: graphs want all tensors to be of one length.
        self._step = mmap.PAGESIZE // gcd(mmap.PAGESIZE, *(values * dtype.itemsize for _, values in shapes))
        for heads, values in shapes:
            width = values * dtype.itemsize
            self._tensors.append(_Tensor(end, heads, values, self._round_up(positions) * width, width))
            end += 2 * rows * heads * self._tensors[-1].size
        self._file = os.memfd_create("llmc-kv-cache")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, end)
        _LIVING.add(self)
        self._views: list[_View] = []
        self._own = list(range(rows))  # the slot of each row
        self._common: list[tuple[int, int] | None] = [None] * rows  # whose pages a row maps, up to a position

    def resize(self, rows: int, positions: int) -> list[NDArray[Any]]:
        """Map everything at addresses for at least so many positions; the arrays, which end no sooner than the others
        before. A failure changes nothing."""
        shapes = [(rows, it.heads, self._round_up(positions), it.values) for it in self._tensors]
        sizes = [prod(shape) * self._dtype.itemsize for shape in shapes]
        flat = np.frombuffer(map_fresh(sum(sizes), NO_RESERVE), np.uint8)
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        before = self._views, list(self._common)
        strides = (shape[2] * it.width for shape, it in zip(shapes, self._tensors, strict=True))
        self._views = [_View(part.ctypes.data, stride) for part, stride in zip(parts, strides, strict=True)]
        try:
            for row in range(rows):
                self._map(row, self._own[row], self._common[row])
        except ResourceError:
            self._views, self._common = before
            raise
        return [part.view(self._dtype).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _round_up(self, positions: int) -> int:
        return -(-positions // self._step) * self._step

    def shares(self, row: int) -> int:
        """Positions of a row that lie in common pages, which it must not write."""
        common = self._common[row]
        return 0 if common is None else max(1, common[1])  # one of a row that was torn

    def share(self, source: int, target: int, end: int) -> None:
        """Let a row, which writes all of itself, have the pages wholly in the first ``end`` positions of another."""
        if end * max(it.width for it in self._tensors) < mmap.PAGESIZE:
            return
        slot, held = self._common[source] or (self._own[source], end)
        if self._common[source] is None:
            self._map(source, slot, (slot, end), whole=False)
        self._map(target, self._own[target], (slot, min(held, end)), whole=False)

    def first_unshared(self, tensor: int, row: int) -> int:
        """The first position of a tensor's row that lies in a page of its own, in part at least."""
        width = self._tensors[tensor].width
        return whole_pages(0, self.shares(row) * width)[1] // width

    @property
    def span(self) -> int:
        """The most positions that have a part in one page."""
        return mmap.PAGESIZE // min(it.width for it in self._tensors) + 1

    def renew(self, row: int, end: int = 0) -> None:
        """Let a row write all of itself from ``end`` on; of what it held only common pages before that stay."""
        others = {common[0] for common in self._common[:row] + self._common[row + 1 :] if common}
        slot, (before, _) = self._own[row], self._common[row] or (self._own[row], 0)
        if slot in others:
            slot = next(free for free in range(2 * len(self._own)) if free not in {*others, *self._own, before})
        self._map(row, slot, (before, end) if end else None)
        self._trim(before)

    def release(self, row: int) -> None:
        """Give the memory of a row back, except common pages."""
        if self._common[row] is not None:
            with suppress(ResourceError):  # it is renewed when it begins anew
                self.renew(row)
        self._free(self._own[row])

    def exchange(self, one: int, other: int) -> None:
        mine, its = (self._own[one], self._common[one]), (self._own[other], self._common[other])
        self._common[one], self._common[other] = (mine[0], 0), (its[0], 0)  # until both are mapped
        self._map(one, *its)
        self._map(other, *mine)

    def give_back(self, tensor: int, row: int, first: int, last: int) -> None:
        """Give back the whole pages among positions of a row, except common ones."""
        it = self._tensors[tensor]
        begin, end = whole_pages(max(first, self.shares(row)) * it.width, last * it.width)
        for start in it.list_heads(self._own[row]) if begin < end else ():
            self._punch(start + begin, end - begin)

    def _map(self, row: int, slot: int, common: tuple[int, int] | None, whole: bool = True) -> None:
        """Map a row's common pages and, for the ``whole`` row, the rest of its slot. If it fails, renew the row."""
        self._own[row], self._common[row] = slot, (slot, 0)
        for it, view in zip(self._tensors, self._views, strict=True):
            address = view.address + row * it.heads * view.stride
            shared = whole_pages(0, common[1] * it.width)[1] if common is not None else 0
            for mine, others in zip(it.list_heads(slot), it.list_heads(common[0] if common else slot), strict=True):
                if shared:
                    self._map_at(address, shared, PRIVATE, others)
                if whole and shared < view.stride:
                    self._map_at(address + shared, view.stride - shared, SHARED, mine + shared)
                address += view.stride
        self._common[row] = common

    def _map_at(self, address: int, size: int, kind: int, offset: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc().mmap(address, size, access, kind | FIXED, self._file, offset) != address:
            raise ResourceError(
                f"the system does not map pages of the cache ({os.strerror(ctypes.get_errno())}); allow it more "
                "(sysctl vm.max_map_count), or run with a smaller --max-batch"
            )

    def _trim(self, slot: int) -> None:
        """Give back what no row maps of a slot that no row writes."""
        if slot in self._own:
            return
        end = max((common[1] for common in self._common if common and common[0] == slot), default=0)
        for it in self._tensors:
            kept = whole_pages(0, end * it.width)[1]
            for start in it.list_heads(slot):
                self._punch(start + kept, it.size - kept)

    def _free(self, slot: int) -> None:
        for it in self._tensors:
            self._punch(it.list_heads(slot).start, it.heads * it.size)

    def _punch(self, offset: int, size: int) -> None:
        _libc().fallocate(self._file, PUNCH_HOLE, offset, size)  # a failure keeps memory, no more


_LIVING: "weakref.WeakSet[Pages]" = weakref.WeakSet()


def map_fresh(size: int, flags: int = 0) -> mmap.mmap:
    """Memory of so many zeros, which is taken when it is written."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        raise ResourceError(
            f"growing the cache ran out of memory ({size} bytes at once); use a smaller --max-context or model"
        ) from error


def whole_pages(first: int, last: int) -> tuple[int, int]:
    """The bytes of whole pages among the bytes ``first`` ... ``last - 1``."""
    return -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, numbers = ctypes.c_void_p, [ctypes.c_int] * 3
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_int64]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc
