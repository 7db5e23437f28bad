"""Responses that clients may go on from: kept in memory, bounded, and apart for every key."""

import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from typing import Any

from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.streams import in_pieces

Item = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A response with what it answered."""

    previous: str | None  # the id of the response that it goes on from
    items: bytes  # what was new in its input, as JSON
    response: bytes  # as it was sent
    ids: tuple[str, ...] = ()  # of those items, and of those of its output

    @property
    def size(self) -> int:
        return len(self.items) + len(self.response)


def make_stored(previous: str | None, items: list[Item], response: dict[str, Any]) -> Stored:
    ids = tuple(item["id"] for item in (*items, *response["output"]))
    return Stored(previous, in_pieces(items).encode(), in_pieces(response).encode(), ids)


def read(kept: bytes) -> Any:
    """The value of JSON that is kept; between its objects other threads have their turn."""
    return json.loads(kept, object_hook=_same)


def _same(value: dict[str, Any]) -> dict[str, Any]:
    return value


class ResponseStore:
    """Responses by their key's name and their id. The one that was used longest ago makes room for a new one, and what
    a conversation goes on from is never older than it. Any thread may call it.
    ``most_bytes``: of their JSON together. A larger one is not kept, and where it is 0 none is.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str | None, str], Stored] = OrderedDict()
        self._places: dict[tuple[str | None, str], tuple[str | None, str]] = {}  # of items, the latest response
        self._lock = Lock()
        self.bytes = 0

    @property
    def keeps(self) -> bool:
        return self._most_bytes > 0

    def put(self, owner: str | None, name: str, stored: Stored) -> None:
        """Keep a response; those that its room takes are gone."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._kept[owner, name] = stored
            self._places |= {(owner, item): (owner, name) for item in stored.ids}
            self.bytes += stored.size
            self._use(owner, stored.previous)
            while self.bytes > self._most_bytes:
                self._forget(next(iter(self._kept)))

    def get(self, owner: str | None, name: str) -> Stored:
        """A response of this key. Raises ApiError: 404, it has none of that name, or no more."""
        with self._lock:
            return self._get(owner, name)

    def delete(self, owner: str | None, name: str) -> None:
        """Forget a response; conversations that go on from it end with it. Raises ApiError: 404, as :meth:`get`."""
        with self._lock:
            self._get(owner, name)
            self._forget((owner, name))

    def _forget(self, place: tuple[str | None, str]) -> None:
        stored = self._kept.pop(place)
        self.bytes -= stored.size
        for item in stored.ids:
            if self._places.get((place[0], item)) == place:
                del self._places[place[0], item]

    def conversation(self, owner: str | None, name: str | None) -> list[Item]:
        """All items up to a response and with its output, the oldest first; none before the first response.
        Raises ApiError: 404, it or one before it is not stored."""
        turns = []
        while name is not None:
            stored = self.get(owner, name)
            turns.append([*read(stored.items), *read(stored.response)["output"]])
            name = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    def items(self, owner: str | None, ids: Collection[str]) -> dict[str, Item]:
        """Items of this key's responses, or of what these answered, by id; those that are not stored are absent."""
        with self._lock:
            places = {self._places[owner, item] for item in ids if (owner, item) in self._places}
            kept = [self._kept[place] for place in places]
        found = [item for stored in kept for item in (*read(stored.items), *read(stored.response)["output"])]
        return {item["id"]: item for item in found if item["id"] in ids}

    def _get(self, owner: str | None, name: str) -> Stored:
        if (owner, name) not in self._kept:
            said = f"no response {name[:80]!r} is stored; it was deleted, had to make room for later ones, or never was"
            raise ApiError(404, said, code="response_not_found")
        self._kept.move_to_end((owner, name))
        return self._kept[owner, name]

    def _use(self, owner: str | None, name: str | None) -> None:
        """Mark a conversation and its ancestors as recently used."""
        while name is not None and (owner, name) in self._kept:
            self._kept.move_to_end((owner, name))
            name = self._kept[owner, name].previous
