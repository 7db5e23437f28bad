"""Who runs next: admission in a fair order, and prompts fed in chunks without starving those who already stream."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.api.options import DECODE_STEPS_PER_CHUNK

# What a step of priority is worth: a request overtakes those with a priority one worse that came at most so many
# requests before it. Finite, so that nobody waits for ever.
ARRIVALS_PER_PRIORITY = 64


@dataclass(order=True)
class Waiting:
    """A request in the queue; the smallest goes first."""

    rank: int
    arrival: int
    unit: Any = field(compare=False)


class Queue:
    """Requests that wait, by priority and arrival."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, unit: Any, priority: int) -> Waiting:
        """Let ``unit`` wait; the ticket puts it back where it was, with :meth:`again`."""
        self._arrivals += 1
        ticket = Waiting(self._arrivals + priority * ARRIVALS_PER_PRIORITY, self._arrivals, unit)
        heapq.heappush(self._heap, ticket)
        return ticket

    def again(self, ticket: Waiting, unit: Any) -> None:
        """Let ``unit`` wait in the place of ``ticket``: a further sample of a request that had its turn."""
        heapq.heappush(self._heap, Waiting(ticket.rank, ticket.arrival, unit))

    def peek(self) -> Any | None:
        """Who is next."""
        return self._heap[0].unit if self._heap else None

    def pop(self) -> Any:
        """Take the next one out."""
        return heapq.heappop(self._heap).unit

    def remove(self, where: Callable[[Any], bool]) -> list[Any]:
        """Take out everyone for whom ``where`` holds."""
        gone = [ticket.unit for ticket in self._heap if where(ticket.unit)]
        if gone:
            self._heap = [ticket for ticket in self._heap if not where(ticket.unit)]
            heapq.heapify(self._heap)
        return gone


class ChunkPacer:
    """When the next chunk of a prompt may be fed while others decode.

    The first chunk of a prompt goes at once, so short prompts never wait. Each further chunk waits until
    ``spacing`` decode steps have run since the last one, and until decoding had as much time as that chunk took. A
    first chunk in between counts like a step: a further one is due after so many, however many new prompts come.

    Args:
        spacing: decode steps between chunks; 0 feeds prompts as fast as possible.
    """

    def __init__(self, spacing: int = DECODE_STEPS_PER_CHUNK) -> None:
        self._spacing = spacing
        self._steps = max(1, spacing)
        self._owed = 0.0

    @property
    def due(self) -> bool:
        """Whether a further chunk goes before the first one of a new prompt."""
        return self._steps >= max(1, self._spacing) and self._owed <= 0

    def allows(self, first_chunk: bool, decoding: bool) -> bool:
        """Whether a chunk may be fed now."""
        return first_chunk or not decoding or not self._spacing or self.due

    def fed(self, seconds: float, first_chunk: bool) -> None:
        """A chunk was fed and took so long."""
        if first_chunk and not self.due:
            self.decoded(seconds)
        else:
            self._steps, self._owed = 0, seconds

    def decoded(self, seconds: float) -> None:
        """A decode step ran, or whatever else goes before a further chunk, and took so long."""
        self._steps += 1
        self._owed -= seconds
