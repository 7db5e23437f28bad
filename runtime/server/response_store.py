"""Responses that clients may go on from: kept in memory, bounded, and apart for every key."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.streams import encoded

Item = dict[str, Any]
# A delta of an output: how many characters it had, and how many tokens' log-probabilities came with it.
Piece = tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """A response with what it answered.

    Attributes:
        previous: the id of the response that it goes on from.
        items: what was new in its input.
        response: as it was sent.
        pieces: the pieces in which its output came, see :class:`llmc.runtime.server.response_events.Output`.
    """

    previous: str | None
    items: list[Item]
    response: dict[str, Any]
    pieces: list[list[Piece]] = field(default_factory=list)


class ResponseStore:
    """Responses by their key's name and their id, as JSON. The one that was used longest ago makes room for a new one,
    and what a conversation goes on from is never older than it.

    Args:
        most_entries: responses; 0 keeps none.
        most_bytes: of their JSON together. A larger one is not kept.
    """

    def __init__(self, most_entries: int, most_bytes: int) -> None:
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._texts: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def keeps(self) -> bool:
        """False if nothing is ever kept."""
        return self._most_entries > 0 and self._most_bytes > 0

    def put(self, owner: str | None, stored: Stored) -> None:
        """Keep a response; those that its room takes are gone."""
        text = encoded([stored.previous, stored.items, stored.response, stored.pieces]).encode()
        if not self.keeps or len(text) > self._most_bytes:
            return
        name = (owner, stored.response["id"])
        self._texts[name] = text
        self.bytes += len(text)
        self._use(owner, stored.previous)
        while len(self._texts) > self._most_entries or self.bytes > self._most_bytes:
            self.bytes -= len(self._texts.popitem(last=False)[1])

    def get(self, owner: str | None, name: str) -> Stored:
        """A response of this key.

        Raises:
            ApiError: 404, it has none of that name, or no more.
        """
        if (owner, name) not in self._texts:
            said = f"no response {name[:80]!r} is stored; it was deleted, had to make room for later ones, or never was"
            raise ApiError(404, said, code="response_not_found")
        self._texts.move_to_end((owner, name))
        return Stored(*json.loads(self._texts[owner, name]))

    def delete(self, owner: str | None, name: str) -> None:
        """Forget a response; conversations that go on from it end with it.

        Raises:
            ApiError: 404, as :meth:`get`.
        """
        self.get(owner, name)
        self.bytes -= len(self._texts.pop((owner, name)))

    def conversation(self, owner: str | None, name: str | None) -> list[Item]:
        """All items up to a response and with its output, the oldest first; none before the first response.

        Raises:
            ApiError: 404, it or one before it is not stored.
        """
        turns = []
        while name is not None:
            stored = self.get(owner, name)
            turns.append([*stored.items, *stored.response["output"]])
            name = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    def _use(self, owner: str | None, name: str | None) -> None:
        """Make a conversation newer than what goes on from it, so that it does not leave before."""
        while name is not None and (owner, name) in self._texts:
            self._texts.move_to_end((owner, name))
            name = json.loads(self._texts[owner, name])[0]
