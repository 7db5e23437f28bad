"""One sequence's speculation: its drafter, how much of it pays, and what it costs."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.runner.model_runner import ModelRunner
from llmc.runtime.speculation.control import LONGEST, TRIAL, DraftLength, Ledger
from llmc.runtime.speculation.drafters import Drafter

LOOK_SHARE = 0.005
"""Part of the time without drafts that looking for drafts takes at most, in the long run."""


class Speculator:
    """Asks the drafter for one sequence's drafts and learns from what becomes of them.

    Each step: :meth:`drafts`; the call, with its seconds told to ``costs``; :func:`verify`; :meth:`note_committed`.

    Drafts that are not worth a call are compared with the tokens that come anyway, so text that begins to repeat itself
    is noticed. After a look without drafts the next look waits until looks take 0.5 % of the time. A draft model reads
    no further prompt while the prompts that it read took more time than that and its drafts won.
    """

    def __init__(self, key: int, drafter: Drafter, costs: StepCosts, control: DraftLength) -> None:
        self._key = key
        self._drafter = drafter
        self._costs = costs
        self._name = control.drafter
        self._looking = f"{self._name}, no drafts"
        self.control = control
        self._length = 0
        self._seconds: float | None = None
        self._rest = 0.0
        self._guess: tuple[int, list[int]] | None = None  # drafts that are not verified, and where they would be

    def drafts(self, tokens: Sequence[int], room: int, rows: int = 1) -> list[int]:
        """Drafts to verify after ``tokens`` (prompt and generated so far), at most ``room``; often none.

        ``room`` is how many may be committed before the last one, from 0; ``rows`` the sequences in the batch.
        """
        if self._rest > 0 or room < 1:
            return []
        start = perf_counter()
        if not (plain := self.control.step(rows)):
            return []
        # The drafter first reads the prompt, which is not the usual cost, and little where it is no model.
        usual = self._length > 0
        reads = self._drafter.costs_by_token and not usual
        if reads and self.control.shared.reading <= 0:
            return []
        self._compare(tokens)
        found = self._find_drafts(tokens, room, rows)
        self._seconds = perf_counter() - start if usual else None
        if reads:
            self.control.shared.book_reading(rows * (perf_counter() - start) / plain)
        if not found and self._seconds is not None:
            self._costs.observe(self._looking, 1, 1, self._seconds)
            spent = self._costs.predict(self._looking, 1, 1) or 0.0
            self._rest = rows * spent / plain / LOOK_SHARE
        return found

    def note_committed(self, proposed: int, tokens: int, rows: int = 1) -> None:
        """Learn that after ``proposed`` drafts, or none, ``tokens`` tokens were committed, from 1."""
        if proposed:
            self.control.note_verified(proposed, tokens - 1, rows, self._seconds)
            return
        self._rest -= 1
        self.control.plain()

    def close(self) -> None:
        self._drafter.forget(self._key)
        self.control.close()

    def _find_drafts(self, tokens: Sequence[int], room: int, rows: int) -> list[int]:
        asked = min(room, self.control.length(rows) if self._drafter.costs_by_token else LONGEST)
        had = self._propose(tokens, asked or TRIAL)
        kept = self.control.keep(len(had), rows) if asked and had else 0
        if kept:
            self._guess = None
        elif had and self._guess is None:
            self._guess = len(tokens), had[:TRIAL]
        return had[:kept]

    def _propose(self, tokens: Sequence[int], count: int) -> list[int]:
        start = perf_counter()
        found = list(self._drafter.propose(self._key, tokens, count))[:count]
        usual = self._length > 0 and len(tokens) - self._length <= LONGEST + 1
        self._length = len(tokens)
        if usual and found:
            self._costs.observe(self._name, 1, len(found), perf_counter() - start)
        return found

    def _compare(self, tokens: Sequence[int]) -> None:
        """Judge the last guess once it was wrong, or all of it has come."""
        if (guess := self._guess) is None:
            return
        start, guessed = guess
        came = tokens[start : start + len(guessed)]
        right = next((i for i, (a, b) in enumerate(zip(guessed, came, strict=False)) if a != b), len(came))
        if right < len(came) or len(came) == len(guessed):
            self._guess = None
            self.control.note_watched(len(guessed), right)


def make_speculators(drafter: Drafter, runner: ModelRunner) -> Callable[[int], Speculator]:
    """A factory of speculators by a sequence's key, sharing ledger and costs."""
    ledger = Ledger()

    name = type(drafter).__name__

    def make(key: int) -> Speculator:
        control = DraftLength(runner.costs, name, runner.phase, runner.step_seconds, ledger)
        return Speculator(key, drafter, runner.costs, control)

    return make


def verify(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    """The tokens to commit when ``drafts`` were fed and the model has logits before, between and after them.

    ``draw(i)`` draws the model's token from the logits at the ``i``-th of the fed positions. Draws go on while they
    agree with the drafts; the first that does not is committed and is the last; after the last draft one more is drawn.
    ``draw`` is called in order and only when a token is asked for.

    This is speculative sampling (Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al.,
    https://arxiv.org/abs/2302.01318) with a proposal that puts all its mass on the draft d: a token drawn from p equals
    d with probability p(d), and otherwise is distributed as p without d, the normalised residual. The draws see the
    logits that they would see without drafts, and randomness is a function of (seed, position), so the tokens are the
    same ones as far as the session's logits are the same bits.
    """
    for i, draft in enumerate(drafts):
        token = draw(i)
        yield token
        if token != draft:
            return
    yield draw(len(drafts))
