"""One sequence's speculation: its drafter, how much of it pays, and what it costs."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.speculation.control import TRIAL, DraftLength
from llmc.runtime.speculation.drafters import Drafter

WATCH_SHARE = 0.005
"""Of a step's time: a drafter that takes less goes on while drafting is off, to see whether it would pay."""


class Speculator:
    """Asks the drafter for one sequence's drafts and learns from what becomes of them.

    Each step: :meth:`drafts`; the call, with its seconds told to ``costs``; :func:`verify`;
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


def verify(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    """The tokens to commit when ``drafts`` were fed and the model has logits before, between and after them.

    ``draw(i)`` draws the model's token from the logits at the ``i``-th of the fed positions (0: what the first draft
    has to agree with; ``len(drafts)``: the token after the last). Draws go on while they agree with the drafts; the
    first that does not is committed and is the last; after the last draft one more is drawn. So 1 ... ``len(drafts)``
    + 1 tokens come, all but the last equal to the drafts, and ``draw`` is called once for each, in order and only when
    it is asked for: whoever stops early, at an end-of-sequence token, has drawn nothing beyond it.

    This is speculative sampling (Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al.,
    https://arxiv.org/abs/2302.01318) with a proposal q that puts all its mass on the draft d. There d is accepted with
    probability min(1, p(d) / q(d)) = p(d), and otherwise a token is drawn from the residual max(0, p - q), normalised,
    which is p without d. Here one token t is drawn from p. It equals d with probability p(d); and given that it does
    not, it is distributed as p without d. The two agree in distribution, which is p: P(t = d) = p(d), and for x other
    than d P(t = x) = (1 - p(d)) * p(x) / (1 - p(d)) = p(x). Whatever the drafts are, even chosen against us, as long as
    they do not know the draw itself.

    More than that: the draws see the logits that they would see without drafts, and randomness is a function of (seed,
    position), so the tokens are the same ones, not only as probable. (As far as the logits are the same bits; that is
    the session's part.)
    """
    for i, draft in enumerate(drafts):
        token = draw(i)
        yield token
        if token != draft:
            return
    yield draw(len(drafts))
