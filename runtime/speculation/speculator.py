"""One sequence's speculation: its drafter, how much of it pays, and what it costs."""

from collections.abc import Sequence
from time import perf_counter

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.speculation.control import TRIAL, DraftLength
from llmc.runtime.speculation.drafters import Drafter

WATCH_SHARE = 0.005
"""Of a step's time: a drafter that takes less goes on while drafting is off, to see whether it would pay."""


class Speculator:
    """Asks the drafter for one sequence's drafts and learns from what becomes of them.

    Each step: :meth:`drafts`; the call, with its seconds told to ``costs``; :func:`llmc.runtime.speculation.verify`;
    :meth:`committed`.

    While drafting is off, a drafter that costs next to nothing (prompt lookup) is watched: its guesses are compared
    with the tokens that come anyway, so text that begins to repeat itself is noticed at once and for free.

    Args:
        key: names the sequence to the drafter.
        costs: seconds of the session's calls; the drafter's are kept there too, under the name of its class.
        control: chooses their number.
    """

    def __init__(self, key: int, drafter: Drafter, costs: StepCosts, control: DraftLength) -> None:
        self._key = key
        self._drafter = drafter
        self._costs = costs
        self._name = type(drafter).__name__
        self.control = control
        self._length = 0
        self._spent = 0.0
        self._seconds: float | None = None
        self._guess: tuple[int, list[int]] | None = None

    def drafts(self, tokens: Sequence[int], room: int, rows: int = 1) -> list[int]:
        """Drafts to verify after ``tokens`` (prompt and generated so far), at most ``room``; often none.

        ``room`` is how many may be committed before the last one, from 0; ``rows`` the sequences in the batch.
        """
        self._compare(tokens, rows)
        if not self.control.active:
            self._watch(tokens, rows)
            return []
        self._guess = None
        count = min(room, self.control.length(rows))
        if count < 1:
            return []
        found = self._propose(tokens, count)
        return found[: self.control.keep(len(found), rows)]

    def committed(self, proposed: int, tokens: int, rows: int = 1) -> None:
        """Learn that after ``proposed`` drafts, or none, ``tokens`` tokens were committed, from 1."""
        if not proposed:
            self.control.plain(rows)
            return
        self.control.verified(proposed, tokens - 1, rows, self._seconds)

    def close(self) -> None:
        """The sequence has ended."""
        self._drafter.forget(self._key)

    def _propose(self, tokens: Sequence[int], count: int) -> list[int]:
        start = perf_counter()
        found = list(self._drafter.propose(self._key, tokens, count))[:count]
        seconds = self._spent = perf_counter() - start
        # The drafter first reads what it has not seen; after the prompt or a long pause that is not the usual cost.
        usual = self._length > 0 and len(tokens) - self._length <= self.control.longest + 1
        self._length, self._seconds = len(tokens), seconds if usual else None
        if usual and found:
            self._costs.observe(self._name, 1, len(found), seconds)
        return found

    def _watch(self, tokens: Sequence[int], rows: int) -> None:
        plain = self.control.step(rows)
        cost = self._costs.predict(self._name, 1, TRIAL)
        if plain is None or self._guess is not None:
            return
        if self._spent < plain if cost is None else cost < WATCH_SHARE * plain:
            found = self._propose(tokens, TRIAL)
            self._guess = (len(tokens), found) if found else None

    def _compare(self, tokens: Sequence[int], rows: int) -> None:
        """Judge the last guess once it was wrong, or all of it has come."""
        if self._guess is None:
            return
        start, guess = self._guess
        came = tokens[start : start + len(guess)]
        right = next((i for i, (a, b) in enumerate(zip(guess, came, strict=False)) if a != b), len(came))
        if right < len(came) or len(came) == len(guess):
            self._guess = None
            self.control.watched(len(guess), right, rows)
