"""Steps under way in the stages of a model, so that none of them waits for another."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from llmc.runtime.kv.rows import Slot
from llmc.runtime.sessions import Batch

# Rows of a group at least: a stage reads its weights for each group, and of single rows nothing is gained by that.
LEAST_ROWS = 2

_S = TypeVar("_S", bound=Slot)


@dataclass(frozen=True)
class _Step(Generic[_S]):
    """A pending call of a group, and where each of its sequences stood."""

    group: list[_S]
    places: list[tuple[int, int]]
    call: Batch

    @property
    def holds(self) -> bool:
        """False once a row moved or left: then the earlier stages have the group's rows in other places."""
        return self.places == [(sequence.row, sequence.cached) for sequence in self.group]


class StepsAhead(Generic[_S]):
    """Groups of rows that take turns: while the last stage computes one's step, those before it compute the others'.

    If a row moved, its pending step is dropped and started again; it rewrites the same cache positions. Steps with
    drafts, of rows that go on together or of few rows are not divided. (Undivided steps tell what a step costs, which
    drafting needs to know.)

    Args:
        begin: starts the step of a group, in the stages before the last, where so many rows decode in all.
        most: groups at most; more than there are stages gain nothing, as a step needs the token of the one before.
    """

    def __init__(self, begin: Callable[[list[_S], int], Batch], most: int) -> None:
        self._begin, self._most = begin, most
        self._under_way: deque[_Step[_S]] = deque()

    def next(self, sequences: Sequence[_S]) -> tuple[list[_S], Batch] | None:
        """The group whose step is finished next, and its call, after the other groups' calls were started; None for an
        undivided step. ``sequences`` are all that decode, in rows side by side."""
        count = min(self._most, len(sequences) // LEAST_ROWS)
        if count < 2 or any(sequence.drafts or sequence.together for sequence in sequences):
            self._under_way.clear()
            return None
        self._under_way = deque(step for step in self._under_way if step.holds)
        busy = {sequence.row for step in self._under_way for sequence in step.group}
        borders = [len(sequences) * i // count for i in range(count + 1)]
        for start, end in pairwise(borders):
            group = [*sequences[start:end]]
            if busy.isdisjoint(sequence.row for sequence in group):  # of other borders' groups, once these are done
                places = [(sequence.row, sequence.cached) for sequence in group]
                self._under_way.append(_Step(group, places, self._begin(group, len(sequences))))
        step = self._under_way.popleft()
        return step.group, step.call
