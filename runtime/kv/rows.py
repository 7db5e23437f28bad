"""Rows of the cache, and the sequences that hold them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.kv.cache import KVCache
from llmc.runtime.vision.rows import ImageRows


class TornError(Exception):
    """Positions could not be moved between rows, whose contents are unknown now; ``__cause__`` says why."""


@dataclass(frozen=True)
class Window:
    """A call for one row that brings its own tokens."""

    start: int  # position of the first token
    tokens: list[int]
    outputs: list[int]  # indices of the tokens whose logits are wanted
    feeds: dict[str, NDArray[Any]]  # further inputs by name


@dataclass(eq=False)
class Slot:
    """A sequence of tokens whose beginning lies in a row of the cache."""

    context: Sequence[int]  # the tokens that the row holds or will hold
    cached: int = 0  # number of them in the row: all but the last of a sequence that decodes
    row: int = -1  # its row, -1 without one
    drafts: list[int] = field(default_factory=list)  # guesses at its next tokens, to be verified in this step
    stop: int = 0  # position at which a call that feeds the context ends, 0: none
    images: ImageRows | None = None  # the images that some tokens stand for
    window: Window | None = None  # this step's call, where that is not its last token and drafts
    together: ClassVar[bool] = False  # whether it steps with the others of its request

    @property
    def takes_ranked(self) -> bool:
        """True if the most probable tokens may be all that its next token is chosen from."""
        return False

    @property
    def adapter(self) -> Any:
        """The adapter that its tokens are computed with, None for none."""
        return None

    @property
    def is_text(self) -> bool:
        """True if no row of embeddings takes the place of a token."""
        return self.images is None

    @property
    def names(self) -> Sequence[int]:
        """Its context as the prefix cache knows it: image tokens are named by the contents of images."""
        return self.context if self.images is None else self.images.name_tokens(self.context)

    def fit_end(self, start: int, end: int) -> int:
        """The end of a chunk from ``start``, moved so that it cuts nothing that has to be fed whole."""
        return end if self.images is None else self.images.fit_end(start, end, len(self.context))

    @property
    def has_own_graph(self) -> bool:
        """True if its tokens are computed by another graph than those of most rows."""
        return self.adapter is not None

    @property
    def is_fed_alone(self) -> bool:
        """True if its prompt shares no call: it has images, or an adapter, which take graphs of their own."""
        return self.images is not None or self.has_own_graph

    @property
    def text_length(self) -> int:
        """Tokens of its text, by which ropes switch."""
        return len(self.context)

    def feeds(self, start: int, end: int) -> dict[str, NDArray[Any]]:
        """Inputs that it brings to a call of its tokens ``start`` ... ``end - 1``, by name, of one row each."""
        images = {} if self.images is None else self.images.feeds(start, end)
        return {"text_lengths": np.array([self.text_length]), **images}


_S = TypeVar("_S", bound=Slot)


class Rows(Generic[_S]):
    """Rows of the cache, packed: first the sequences that decode, so that one call serves them all, then those whose
    prompt is being fed. A row that becomes free is filled with the positions of the last one."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._order: list[_S] = []
        self._decoding = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def decoding(self) -> int:
        """Number of rows that decode: 0 ... decoding - 1."""
        return self._decoding

    @property
    def held(self) -> Sequence[_S]:
        """The slots in the order of rows."""
        return self._order

    def at(self, row: int) -> _S | None:
        """The slot that has ``row``, None if it is free."""
        return self._order[row] if row < len(self._order) else None

    def admit(self, slot: _S) -> None:
        slot.row = len(self._order)
        self._order.append(slot)

    def promote(self, slot: _S) -> None:
        self._swap(slot, self._decoding)
        self._decoding += 1

    def demote(self, slot: _S) -> None:
        """From decoding to feeding; what it had cached is gone."""
        slot.cached = 0
        self._decoding -= 1
        self._swap(slot, self._decoding)

    def can_fork(self, parent: _S, cached: int) -> bool:
        """Tell whether a row with the first ``cached`` positions of ``parent`` can be had."""
        return cached == parent.cached or self._cache.can_resume(parent.row, cached)

    def fork(self, parent: _S, child: _S, cached: int) -> None:
        """Give ``child`` a decoding row with the first ``cached`` positions of ``parent``, which decodes."""
        assert parent.row < self._decoding and cached <= parent.cached
        child.cached = 0
        self.admit(child)
        self.promote(child)
        self.copy(parent, child, 0, cached)

    def copy(self, source: _S, target: _S, start: int, cached: int) -> None:
        """Make ``target`` equal to ``source`` up to ``cached`` positions; they are known to agree before ``start``."""
        if start < cached or not self._cache.can_rewind:
            with moving():
                self._cache.copy(source.row, target.row, start, cached)
        target.cached = cached

    def release(self, slot: _S) -> None:
        gap = slot.row
        assert self._order[gap] is slot
        if gap < self._decoding:
            self._decoding -= 1
            gap = self._move(self._decoding, gap)
        self._move(len(self._order) - 1, gap)
        self._order.pop()
        slot.row = -1
        self._cache.release(len(self._order))

    def hand_on(self, slot: _S, heir: _S, cached: int) -> None:
        """Give the row of ``slot`` to ``heir``, with its first ``cached`` positions."""
        assert cached <= slot.cached and self.can_fork(slot, cached)
        self._order[slot.row] = heir
        heir.row, slot.row, heir.cached = slot.row, -1, cached

    def clear(self) -> None:
        for slot in self._order:
            slot.row = -1
        self._order.clear()
        self._decoding = 0

    def _move(self, source: int, target: int) -> int:
        """Move the row ``source`` to ``target``; return the row that is free then."""
        if source != target:
            slot = self._order[source]
            with moving():
                self._cache.swap(target, 0, source, slot.cached)
            self._order[target], slot.row = slot, target
        return source

    def _swap(self, slot: _S, row: int) -> None:
        other = self._order[row]
        if other is slot:
            return
        here = slot.row
        with moving():
            self._cache.swap(here, slot.cached, row, other.cached)
        self._order[here], self._order[row] = other, slot
        slot.row, other.row = row, here


@contextmanager
def moving() -> Iterator[None]:
    """Turn any error into a TornError, after which positions may lie in the wrong row."""
    try:
        yield
    except TornError:
        raise
    except Exception as error:
        raise TornError(f"positions could not be moved between rows: {error}") from error
