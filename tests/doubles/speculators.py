"""A speculator that does not measure."""

from collections.abc import Sequence
from typing import Any


class Always:
    """Speculates in every step, whether it pays or not; what pays depends on the clock."""

    def __init__(self, key: int, drafter: Any, *_: Any) -> None:
        self._key, self._drafter = key, drafter

    def drafts(self, tokens: Sequence[int], room: int, rows: int = 1) -> list[int]:
        found: list[int] = self._drafter.propose(self._key, tokens, min(room, 3))
        return found

    def note_committed(self, proposed: int, tokens: int, rows: int = 1) -> None:
        assert 1 <= tokens <= proposed + 1

    def close(self, answer: Sequence[int] = ()) -> None:
        self._drafter.forget(self._key)
