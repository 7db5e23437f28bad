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
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc.errors import ResourceError

KERNEL = Path("/proc/sys/vm")
SHARED, PRIVATE, FIXED = 1, 2, 16  # Linux's flags of mmap
PUNCH_HOLE = 1 | 2  # Linux's flags of fallocate: keep the size, free the pages
PART_OF_MAPPINGS = 4  # of a process's mappings, the share that one cache may take


class _Tensor(NamedTuple):
    """A tensor's part of the file: where it starts, heads of a row, bytes of a head and of a head's position."""

    start: int
    heads: int
    size: int
    width: int

    def place(self, slot: int) -> int:
        """Offset of a slot; the addresses of a row are those of the slot with its number."""
        return self.start + slot * self.heads * self.size

    def list_heads(self, slot: int) -> range:
        return range(self.place(slot), self.place(slot + 1), self.size)


class Pages:
    """Tensors [rows, heads, positions, width] in a sparse file in memory, which has two slots for each row.

    A row writes its own slot. Pages that rows have in common lie in the slot of one of them, are mapped privately by
    all of them and never written again. Pages that were never written take no memory.

    Args:
        shapes: of the tensors, each with at least so many positions; each head then has whole pages.

    Raises:
        OSError: the system does not give the addresses.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: "np.dtype[Any]") -> None:
        self._rows, self._tensors, end = shapes[0][0], list[_Tensor](), 0
        for rows, heads, positions, values in shapes:
            width = values * dtype.itemsize
            step = mmap.PAGESIZE // gcd(mmap.PAGESIZE, width)  # positions that fill whole pages
            self._tensors.append(_Tensor(end, heads, -(-positions // step) * step * width, width))
            end += 2 * rows * heads * self._tensors[-1].size
        self._file = os.memfd_create("llmc-kv-cache")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, end)
        flat = np.frombuffer(mmap.mmap(self._file, end), np.uint8)
        self._address = flat.ctypes.data
        self.arrays = [
            flat[it.start : it.place(rows)].view(dtype).reshape(rows, heads, -1, values)
            for it, (rows, heads, _, values) in zip(self._tensors, shapes, strict=True)
        ]
        self._own = list(range(self._rows))  # the slot of each row
        self._common: list[tuple[int, int] | None] = [None] * self._rows  # whose pages a row maps, up to a position
        mappings = int((KERNEL / "max_map_count").read_text()) // PART_OF_MAPPINGS
        self._most = mappings // (2 * sum(it.heads for it in self._tensors))  # rows that may share

    def shares(self, row: int) -> int:
        """Positions of a row that lie in common pages, which it must not write."""
        common = self._common[row]
        return 0 if common is None else max(1, common[1])  # one of a row that was torn

    def share(self, source: int, target: int, end: int) -> None:
        """Let a row, which writes all of itself, have pages that lie wholly in the first ``end`` positions of another,
        as far as the system has mappings."""
        sharing = sum(common is not None for common in self._common)
        if sharing + 2 > self._most or end * max(it.width for it in self._tensors) < mmap.PAGESIZE:
            return
        slot, held = self._common[source] or (self._own[source], end)
        if self._common[source] is None:
            self._map(source, slot, (slot, end), whole=False)
        self._map(target, self._own[target], (slot, min(held, end)), whole=False)

    def first_unshared(self, tensor: int, row: int) -> int:
        """The first position of a tensor's row of which a part lies in a page of its own."""
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
            slot = next(free for free in range(2 * self._rows) if free not in {*others, *self._own, before})
        self._map(row, slot, (before, end) if end else None)
        if not end and before not in others and before not in self._own:
            self._free(before)

    def release(self, row: int) -> None:
        """Give the memory of a row back, except common pages."""
        if self._common[row] is not None:
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
        """Map a row's slot and common pages; a row of which that fails has to be renewed."""
        self._own[row], self._common[row] = slot, (slot, 0)
        for it in self._tensors:
            if whole:
                self._map_at(it.place(row), it.heads * it.size, SHARED, it.place(slot))
            if common is not None and (length := whole_pages(0, common[1] * it.width)[1]):
                for here, there in zip(it.list_heads(row), it.list_heads(common[0]), strict=True):
                    self._map_at(here, length, PRIVATE, there)
        self._common[row] = common

    def _map_at(self, place: int, size: int, kind: int, offset: int) -> None:
        """Map a part of the file at the addresses of another part."""
        address, access = self._address + place, mmap.PROT_READ | mmap.PROT_WRITE
        if _libc().mmap(address, size, access, kind | FIXED, self._file, offset) != address:
            raise ResourceError(
                f"the system does not map pages of the cache ({os.strerror(ctypes.get_errno())}); allow it more "
                "(sysctl vm.max_map_count), or run with a smaller --max-batch"
            )

    def _free(self, slot: int) -> None:
        for it in self._tensors:
            self._punch(it.place(slot), it.heads * it.size)

    def _punch(self, offset: int, size: int) -> None:
        _libc().fallocate(self._file, PUNCH_HOLE, offset, size)  # a failure keeps memory, no more


def why_not(workspace: int, available: int) -> str:
    """The reason why addresses for all rows of a cache are not to be reserved here; empty if they are.

    ``workspace``: bytes that kernels allocate, and touch in part, with a cache of that size.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this is not Linux, or a Python without memfd_create"
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "the address space is limited (ulimit -v)"
    with suppress(OSError):
        if (KERNEL / "overcommit_memory").read_text().strip() == "2":
            return "the system promises no more memory than it has (vm.overcommit_memory is 2)"
    return "" if workspace <= available else "memory is short"


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
