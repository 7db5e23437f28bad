"""Rows of the cache, and the sequences that hold them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from llmc.runtime.kv.cache import KVCache


class TornError(Exception):
    """Positions could not be moved between rows, for the reason that is its cause: nobody knows what the rows hold."""


class Held(Protocol):
    """The holder of a row, of which ``cached`` positions are filled."""

    row: int
    cached: int


_H = TypeVar("_H", bound=Held)


class Rows(Generic[_H]):
    """Rows of the cache, packed: sequences that decode first, so that one call serves them all, then those whose prompt
    is being fed. Whoever leaves a gap is followed by the last one, whose positions are copied."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._order: list[_H] = []
        self._decoding = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def decoding(self) -> int:
        """Number of rows that decode: 0 ... decoding - 1."""
        return self._decoding

    @property
    def held(self) -> Sequence[_H]:
        """Those who hold a row, in the order of rows."""
        return self._order

    def at(self, row: int) -> _H | None:
        """The holder of ``row``."""
        return self._order[row] if row < len(self._order) else None

    def admit(self, held: _H) -> None:
        """Take the row after all others."""
        held.row = len(self._order)
        self._order.append(held)

    def promote(self, held: _H) -> None:
        """From feeding to decoding."""
        self._swap(held, self._decoding)
        self._decoding += 1

    def demote(self, held: _H) -> None:
        """From decoding to feeding; what it had cached is gone."""
        held.cached = 0
        self._decoding -= 1
        self._swap(held, self._decoding)

    def can_fork(self, parent: _H, cached: int) -> bool:
        """True if a row with the first ``cached`` positions of ``parent`` can be had: all of them, or any if the cache
        can go back."""
        return cached == parent.cached or self._cache.can_rewind

    def fork(self, parent: _H, child: _H, cached: int) -> None:
        """Give ``child`` a decoding row with the first ``cached`` positions of ``parent``, which decodes."""
        assert parent.row < self._decoding and cached <= parent.cached
        child.cached = 0
        self.admit(child)
        self.promote(child)
        self.share(parent, child, 0, cached)

    def share(self, source: _H, target: _H, start: int, cached: int) -> None:
        """Make ``target`` equal to ``source`` up to ``cached`` positions; they are known to agree before ``start``."""
        if start < cached or not self._cache.can_rewind:
            with moving():
                self._cache.copy(source.row, target.row, start, cached)
        target.cached = cached

    def release(self, held: _H) -> None:
        """Free a row."""
        gap = held.row
        assert self._order[gap] is held
        if gap < self._decoding:
            self._decoding -= 1
            gap = self._move(self._decoding, gap)
        self._move(len(self._order) - 1, gap)
        self._order.pop()
        held.row = -1

    def clear(self) -> None:
        """Free every row."""
        for held in self._order:
            held.row = -1
        self._order.clear()
        self._decoding = 0

    def _move(self, source: int, target: int) -> int:
        """Put who is at ``source`` to ``target``, and say which row that leaves free."""
        if source != target:
            held = self._order[source]
            with moving():
                self._cache.copy(source, target, 0, held.cached)
            self._order[target], held.row = held, target
        return source

    def _swap(self, held: _H, row: int) -> None:
        other = self._order[row]
        if other is held:
            return
        here = held.row
        with moving():
            kept = self._cache.read(here, 0, held.cached)
            self._cache.copy(row, here, 0, other.cached)
            self._cache.write(row, 0, held.cached, kept)
        self._order[here], self._order[row] = other, held
        held.row, other.row = row, here


@contextmanager
def moving() -> Iterator[None]:
    """Name what goes wrong inside: it may have left one sequence's positions in another one's row.

    Raises:
        TornError: from whatever was raised.
    """
    try:
        yield
    except Exception as error:
        raise TornError(f"positions could not be moved between rows: {error}") from error
