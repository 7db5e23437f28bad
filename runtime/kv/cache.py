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
from llmc.bundle.model.cache import BACK, LET_GO_STEP, Cache, CacheKind
from llmc.errors import RequestError, UsageError
from llmc.runtime.kv.budget import check_growth, next_capacity
from llmc.runtime.kv.cache_file import Form

Values = NDArray[Any]
KEPT_PLACES = 8  # numbers of positions whose layout is remembered: a block's comes again and again


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of the cache."""

    past: str  # name among a graph's inputs
    present: str  # name among its outputs; empty if it is only read
    kind: CacheKind  # ``kv`` has positions, ``state`` has none
    shape: tuple[int, ...]  # [kv_heads, head_dim] of one position, or the shape of one row's state
    window: int = 0  # positions that are ever read, 0 for all

    def of(self, rows: int, capacity: int) -> tuple[int, ...]:
        """The shape of so many rows of so many positions."""
        if self.kind == "state":
            return (rows, *self.shape)
        heads, width = self.shape
        return (rows, heads, capacity, width)


def tensors_of(caches: Sequence[Cache]) -> tuple[CacheTensor, ...]:
    """The tensors of a decoder's caches: key and value of the first layer, of the next..."""
    return tuple(
        CacheTensor(past, present, cache.kind, cache.shape, cache.window)
        for cache in caches
        for past, present in zip(cache.inputs, cache.outputs or ("", ""), strict=True)
    )


class Layout:
    """Layout of tensors of one kind in one array: tensor after tensor, of each its positions head by head, or its
    state."""

    def __init__(self, tensors: Sequence[CacheTensor], kind: CacheKind = "kv") -> None:
        self._tensors = [tensor for tensor in tensors if tensor.kind == kind]
        self._places = lru_cache(KEPT_PLACES)(self._places_of)

    def size(self, count: int) -> int:
        """Values of ``count`` positions, or of all states."""
        return sum(prod(tensor.of(1, count)) for tensor in self._tensors)

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

    A row with a state goes on after its last token or begins anew, and is copied, read and written as a whole. Where
    memory can be given back in pieces, :meth:`let_go` frees positions that windows have passed; the row then goes on
    after one of the :data:`BACK` positions before, or begins anew.

    Rows, positions and contents that do not fit raise UsageError, a lack of memory ResourceError, the GPU GpuError.

    Args:
        manifest: of the bundle; its list of caches gives the shapes, its plans and limits bound the growth.
        device_memory: bytes of the GPU's memory for the bundle; None where the cache lies in the process.
        guard: entered around everything that touches the memory, with what is being done.

    Attributes:
        tensors: in the order of the layers.
        dtype: of the values; bfloat16 is handed out as uint16, for which numpy has a type.
        can_rewind: whether a row may go back to an earlier position: no entry is a state.
        on_move: functions that are called before memory moves, so that nothing stays bound to it.
    """

    _lets_go = False  # whether memory can be given back in pieces

    def __init__(
        self,
        manifest: Manifest,
        *,
        device_memory: int | None = None,
        guard: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
    ) -> None:
        self.tensors = tensors_of(manifest.list_caches())
        self.dtype: np.dtype[Any] = np.dtype("uint16" if manifest.cache == "bfloat16" else manifest.cache)
        self.device_memory = device_memory
        self.can_rewind = all(tensor.kind == "kv" for tensor in self.tensors)
        self._manifest = manifest
        self._layout, self._states = Layout(self.tensors), Layout(self.tensors, "state")
        self.on_move: list[Callable[[], None]] = []
        self._guard = guard
        self._capacity = 0
        # Per row: end of the positions that were ever written; with states, the position that they are at.
        self._written: list[int] = []
        # Per row: length when positions outside the window were last freed; 0 if none were.
        self._settled: list[int] = []
        self._narrowest = min((tensor.window for tensor in self.tensors if tensor.window), default=0)

    @property
    def rows(self) -> int:
        return len(self._written)

    @property
    def capacity(self) -> int:
        return self._capacity

    # ------------------------------------------------------------------------------------------------- growth

    def type_of(self, tensor: CacheTensor) -> "np.dtype[Any]":
        """Type of a tensor's values: a state is float32 whatever keys and values are."""
        return np.dtype(np.float32) if tensor.kind == "state" else self.dtype

    def grow(self, rows: int, positions: int, most: int) -> None:
        """Make room for ``rows`` rows of ``positions``, rounded up (:func:`next_capacity`) to at most ``most``."""
        if rows > self.rows or positions > self.capacity:
            self.reserve(rows, next_capacity(positions, most))

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow to at least ``rows`` x ``capacity``, and keep the contents; a failure changes nothing.

        Raises:
            RequestError: more than the bundle was built for.
        """
        limits = self._manifest.limits
        if rows > limits.max_batch or capacity > limits.max_context:  # what the engine takes may be beyond them
            raise RequestError(
                f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
                f"{limits.max_batch} x {limits.max_context}; build with larger ones"
            )
        rows, capacity = max(rows, self.rows), max(self._round_capacity(capacity), self._capacity)
        if (rows, capacity) == (self.rows, self._capacity):
            return
        held = self.rows, self._capacity
        check_growth(self._manifest, held, (rows, capacity), self.device_memory)
        with self._guard("growing the cache"):
            self._grow(rows, capacity)
        self._settled += [0] * (rows - self.rows)
        self._written += [0] * (rows - self.rows)
        self._capacity = capacity

    def _round_capacity(self, capacity: int) -> int:
        return capacity

    @abstractmethod
    def _grow(self, rows: int, capacity: int) -> None:
        """Move to memory of another size, with what is written; a failure changes nothing."""

    def _announce_move(self) -> None:
        for announce in self.on_move:
            announce()

    def close(self) -> None:
        """Free everything; the cache then has no rows."""
        self._written, self._settled, self._capacity = [], [], 0

    # ------------------------------------------------------------------------------------------------- calls

    def begin(self, first_row: int, past_lengths: Sequence[int], count: int) -> list[int]:
        """Check a call that writes ``count`` new tokens of each row; the position after the last of each."""
        ends = [past + count for past in past_lengths]
        if first_row + len(ends) > self.rows or max(ends) > self._capacity:
            raise UsageError(
                "first_row",
                f"is {first_row} for {len(ends)} rows up to position {max(ends)}, the cache has {self.rows} rows "
                f"of {self._capacity}",
                "reserve room first",
            )
        for row, past in enumerate(past_lengths, first_row):
            if self._lets_go:
                self._check_resumable(row, past)
            self._prepare(row, past)
        return ends

    def note_computed(self, first_row: int, ends: Sequence[int]) -> None:
        """Note that a call wrote rows up to the positions ``ends``."""
        for row, end in enumerate(ends, first_row):
            self._note_written(row, end)

    def _note_written(self, row: int, end: int) -> None:
        self._written[row] = max(self._written[row], end) if self.can_rewind else end

    def can_resume(self, row: int, position: int) -> bool:
        """Tell whether a row can go on after its first ``position`` tokens."""
        if not position:
            return True
        return position >= self.whole_from(row) if self.can_rewind else position == self._written[row]

    def _check_resumable(self, row: int, position: int) -> None:
        if not self.can_resume(row, position):
            what = "what windows see" if self.can_rewind else "a state"
            raise UsageError(
                "position",
                f"is {position} of row {row}, which holds {what} after {self._written[row]} tokens",
                "feed the row from its first token",
            )

    # ------------------------------------------------------------------------------------------------- windows

    def whole_from(self, row: int) -> int:
        """The first position of a row that all layers still hold."""
        return max(0, self._settled[row] - BACK)

    def is_overdue(self, row: int, end: int) -> bool:
        """Tell whether windows of a row with ``end`` positions have passed so many that :meth:`let_go` is worth it."""
        passed = end - max(self._settled[row], self._narrowest + BACK)
        return self._lets_go and passed >= LET_GO_STEP

    def let_go(self, row: int, end: int) -> None:
        """Give back the memory of what no window sees from the position ``end`` on, nor from :data:`BACK` before it."""
        if self.is_overdue(row, end):
            self._settled[row] = end
            self._discard(row, self._written[row])

    def _prepare(self, row: int, start: int) -> None:
        """Let a row be written from ``start`` on; one that begins anew drops what it held."""
        if not start and self._settled[row]:
            self._discard(row, 0)
            self._settled[row] = self._written[row] = 0

    def _find_first_held(self, tensor: CacheTensor, row: int) -> int:
        return max(0, self._settled[row] - tensor.window - BACK) if tensor.window else 0

    def _discard(self, row: int, end: int) -> None:  # noqa: B027  # few caches let go
        """Give back memory of windows' positions before those held and from ``end`` on, where the cache can."""

    # ------------------------------------------------------------------------------------------------- contents

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Make the row ``target`` equal to ``source`` in the positions ``start`` ... ``end - 1``, and in its states."""
        self._check_range(source, start, end)
        self._check_range(target, start, end)
        if source == target or not end:
            return
        self._check_resumable(source, end)
        self._prepare(target, start)
        with self._guard("copying in the cache"):
            self._copy(source, target, start, end)
            for view, other in zip(self._state_views(target), self._state_views(source), strict=True):
                view[...] = other
        self._settled[target] = max(self._settled[source], self._settled[target])
        self._note_written(target, end)

    def swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        """Exchange two rows, up to the end of each."""
        for row, end in ((one, its_end), (other, others_end)):
            self._check_range(row, 0, end)
            self._check_resumable(row, end)
        with self._guard("moving in the cache"):
            self._swap(one, its_end, other, others_end)
            for view, its in zip(self._state_views(one), self._state_views(other), strict=True):
                view[...], its[...] = its.copy(), view.copy()
        self._written[one], self._written[other] = others_end, its_end
        self._settled[one], self._settled[other] = self._settled[other], self._settled[one]
        if self._settled[one] or self._settled[other]:
            self._discard(one, others_end)
            self._discard(other, its_end)

    def release(self, row: int) -> None:  # noqa: B027  # few caches give memory back
        """Note that no sequence holds a row any more."""

    def form(self, count: int) -> Form:
        """Shape and type of what :meth:`read` gives for ``count`` positions."""
        return (self._layout.size(count),), self.dtype

    @property
    def states_form(self) -> Form:
        """Shape and type of what :meth:`read_states` gives."""
        return (self._states.size(0),), np.dtype(np.float32)

    def read_states(self, row: int, end: int) -> Values:
        """Copy the states of a row after its first ``end`` tokens: one array float32 [values], empty without states."""
        self._check_resumable(row, end)
        values = np.empty(*self.states_form)
        with self._guard("reading the cache"):
            for part, view in zip(self._states.parts(values, 0), self._state_views(row), strict=True):
                part[...] = view
        return values

    def write_states(self, row: int, end: int, values: Values) -> None:
        """Put states, as :meth:`read_states` returns them, into a row that holds ``end`` positions."""
        with self._guard("writing the cache"):
            for part, view in zip(self._states.parts(values, 0), self._state_views(row), strict=True):
                view[...] = part
        self._note_written(row, end)

    def _state_views(self, row: int) -> list[Values]:  # few caches have states
        return []

    def read(self, row: int, start: int, end: int) -> Values:
        """Copy the positions ``start`` ... ``end - 1`` of a row: one array [values], in the cache's own layout."""
        self._check_range(row, start, end)
        if self.can_rewind:
            self._check_resumable(row, end)
        if start < self.whole_from(row):
            raise UsageError(
                "start", f"is {start}, and row {row} of the cache let go of it", f"read from {self.whole_from(row)} on"
            )
        values = np.empty(*self.form(end - start))
        with self._guard("reading the cache"):
            self._read(row, start, end, values)
        return values

    def read_blocks(self, row: int, size: int, start: int, end: int) -> list[Values]:
        """:meth:`read` in blocks of ``size`` positions, which divides what is asked for."""
        return [self.read(row, first, first + size) for first in range(start, end, size)]

    def write(self, row: int, start: int, end: int, values: Values) -> None:
        """Put ``values``, as :meth:`read` returns them, into the positions ``start`` ... ``end - 1``; with states the
        row goes on there once :meth:`write_states` was called."""
        self._check_range(row, start, end)
        shape, dtype = self.form(end - start)
        if values.shape != shape or values.dtype != dtype:
            raise UsageError(
                "values",
                f"is {values.dtype} {list(values.shape)}, expected {dtype} {list(shape)} for {end - start} positions: "
                "it comes from another bundle",
            )
        self._prepare(row, start)
        with self._guard("writing the cache"):
            self._write(row, start, end, values)
        if self.can_rewind:
            self._note_written(row, end)

    @abstractmethod
    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        """:meth:`copy` between two rows."""

    def _swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        kept = np.empty(*self.form(its_end))
        self._read(one, 0, its_end, kept)
        self._copy(other, one, 0, others_end)
        self._write(other, 0, its_end, kept)

    @abstractmethod
    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        """:meth:`read` into ``values``."""

    @abstractmethod
    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        """:meth:`write` of what fits."""

    def _check_range(self, row: int, start: int, end: int) -> None:
        if not (0 <= row < self.rows and 0 <= start <= end <= self._capacity):
            raise UsageError(
                "end",
                f"is {end} from {start} in row {row}, the cache has {self.rows} rows of {self._capacity}",
                "reserve room first",
            )
