"""The number of tokens to draft: as many as are expected to win, within what drafting may still lose."""

from collections.abc import Callable

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sessions.base import Phase

LENGTHS = (1, 3, 5, 7, 11, 15, 23, 31)
"""Draft lengths to choose from. A call has one token more, so calls are even, as kernels for pairs of rows like them,
and of few shapes, as sessions that bind buffers per shape like them."""
LONGEST = LENGTHS[-1]
TRIAL = 3
"""Drafts that are guessed, and compared with what comes, while none are verified."""

STAKE, SHARED_STAKE = 1.5, 6.0
"""Time that drafting may lose before it won any, in times of a token without drafts: a sequence, and all of an
engine."""
ALLOWANCE = 0.005
"""Part of a token's time that each token without drafts adds to that."""
MOST = 10.0
"""Largest balance of a ledger, and largest debt, which an interrupted drafter makes."""
MOST_AT_FIRST = 1.0
"""Largest loss beyond its stake that is booked for the first call of a shape, which may have paid for what later calls
reuse."""
MARGIN = 1.05
"""Speculation must be expected to win by this factor: costs are noisy, and a row that joins a batch has a price."""
LENIENCE = 0.9
"""The same while a sequence has more than its stake: costs of calls that were never made are estimated too high."""
PRIOR = 1.35, 1.5
"""Accepted and judged drafts assumed before the first: as many as text that copies has (0.6 to 0.97), so that each
sequence tries; outvoted soon."""
MEMORY = 64
"""Judged drafts over which acceptance is averaged."""
REMEASURE = 64
"""Verifications in a row after which a step without drafts is made, for its cost grows with the context."""


class Ledger:
    """Time that drafting may still lose, in times of a token without drafts: stake, allowance since, and winnings.

    Each sequence has one, and all of an engine share one, so that many short answers do not each lose a stake.
    ``reading`` is a second account, for the prompts that a draft model reads: once read, a prompt is paid and no reason
    to draft less.
    """

    def __init__(self, stake: float = SHARED_STAKE) -> None:
        self.left = self.reading = stake

    def earn(self) -> None:
        """A token came without drafts."""
        self.left, self.reading = (min(each + ALLOWANCE, MOST) for each in (self.left, self.reading))

    def book_reading(self, lost: float) -> None:
        """Subtract what a drafter took to read a prompt or, below 0, what drafts won."""
        self.reading = max(min(self.reading - lost, MOST), -MOST)

    def book(self, lost: float) -> None:
        """Subtract what a verification lost or, below 0, won."""
        self.left = max(min(self.left - lost, MOST), -MOST)


class DraftLength:
    """Chooses how many tokens to draft for one sequence, from its acceptance so far and the measured costs.

    If each draft is accepted with probability a, independently, a call that verifies k drafts commits E(k) = (1 -
    a^(k+1)) / (1 - a) tokens (Leviathan et al., https://arxiv.org/abs/2211.17192, equation 1). The k with the most
    tokens per second is taken, if it wins by a margin over a step without drafts.

    A call is made only if both ledgers could pay for the rejection of all its drafts. So, as far as costs are known,
    drafting loses at most 0.5 % of the time of tokens without drafts, and beside that the time of 1.5 tokens of a
    sequence and 6 of an engine. Drafts that came true unverified, and would have won, let a sequence stake 1.5 again.

    Args:
        costs: measured seconds of calls; may be shared by all sequences of a session.
        drafter: the name under which ``costs`` knows the drafter's seconds, by number of drafts.
        phase: of the call that verifies with so many tokens; default: of a graph that does them all.
        step: seconds of a step without drafts of so many rows, None while unknown; default: from ``costs``.
        ledger: shared with the other sequences; default: one of its own.
    """

    def __init__(
        self,
        costs: StepCosts,
        drafter: str = "draft",
        phase: Callable[[int], str] = lambda tokens: Phase.PREFILL,
        step: Callable[[int], float | None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.step = step or (lambda rows: costs.predict(Phase.DECODE, rows, 1))
        """Seconds of a step without drafts by its rows."""
        self._costs = costs
        self.drafter = drafter
        self._phase = phase
        self._accepted, self._judged = PRIOR
        self.shared = ledger or Ledger()
        """Time that all sequences may still lose."""
        self._own = Ledger(STAKE)
        self._staked = 0.0
        self._promise = 0.0  # what drafts that came true unverified would have won since the last loss
        self._streak = 0

    def length(self, rows: int = 1) -> int:
        """Drafts to ask for before the next step of a batch of ``rows`` sequences, this one included; 0 for none."""
        return self._choose_length(LONGEST, rows)[0]

    def keep(self, had: int, rows: int = 1) -> int:
        """Number of the ``had`` drafts to verify, the first ones; report them by :meth:`note_verified`."""
        length, stake = self._choose_length(had, rows)
        if length:
            self._staked = stake
            self.shared.book(stake)  # not to be staked twice in a step
        return length

    def note_verified(self, proposed: int, accepted: int, rows: int = 1, seconds: float | None = None) -> None:
        """Learn how many of ``proposed`` > 0 drafts were accepted, once ``costs`` knows the call; ``seconds`` for
        drafting."""
        assert 0 <= accepted <= proposed and proposed > 0
        self._streak += 1
        self._judge(proposed, accepted)
        both = self._seconds(proposed, rows, seconds)
        lost = 0.0 if both is None else rows * both[1] / both[0] - (rows + accepted)
        if self._costs.count(self._phase(proposed + 1), 1, proposed + 1) == 1:
            lost = min(lost, self._staked + MOST_AT_FIRST - accepted)
        self._own.book(lost)
        self.shared.book_reading(min(lost, 0.0))
        if lost > 0:
            self._promise = 0.0
        self.shared.book(lost - self._staked)
        self._staked = 0.0

    def note_watched(self, guessed: int, right: int) -> None:
        """Learn that ``right`` of ``guessed`` > 0 drafts came true that were not verified."""
        assert 0 <= right <= guessed and guessed > 0
        self._judge(guessed, right)
        if both := self._seconds(guessed, 1):
            self._promise = min(max(self._promise + right + 1 - both[1] / both[0], 0.0), STAKE)

    def _judge(self, proposed: int, accepted: int) -> None:
        """Add what became of drafts to the averages."""
        judged = min(accepted + 1, proposed)  # what follows the first wrong draft was never judged
        kept = (1 - 1 / MEMORY) ** judged
        self._accepted = kept * self._accepted + accepted
        self._judged = kept * self._judged + judged

    def plain(self) -> None:
        """Learn that a step without drafts committed one token."""
        self._streak = 0
        self._own.earn()
        self.shared.earn()

    def close(self) -> None:
        self.shared.book(-self._staked)
        self._staked = 0.0

    def _choose_length(self, had: int, rows: int) -> tuple[int, float]:
        """The best length up to ``had`` and what it could lose; 0 if none is expected to win by the margin.

        A length that was verified once, or not for long, counts as no dearer than the settled one before it, or what is
        assumed of unknown ones: the first call of a shape may have been slow, and would be believed for ever.
        """
        best, gain, stake, settled = 0, LENIENCE if self._own.left > STAKE else MARGIN, 0.0, None
        most = min(max(self._own.left, self._promise), self.shared.left)
        for length in LENGTHS:
            if length > had or self._streak >= REMEASURE:
                break
            tokens = length + 1
            count = self._costs.count(self._phase(tokens), 1, tokens)
            both = self._seconds(length, rows, most=(settled or self._assume_seconds(tokens)) if count == 1 else None)
            if count > 1:
                settled = self._costs.predict(self._phase(tokens), 1, tokens)
            if both is None:
                continue
            ratio = both[1] / both[0]
            factor = (rows - 1 + expect_tokens(length, self._accepted / self._judged)) / rows / ratio
            if factor > gain and rows * (ratio - 1) <= most:
                best, gain, stake = length, factor, max(0.0, rows * (ratio - 1))
        return best, stake

    def _seconds(
        self, length: int, rows: int, drafting: float | None = None, most: float | None = None
    ) -> tuple[float, float] | None:
        """Seconds of a step of the batch without drafts, and with ``length`` for this sequence in a call of its own,
        which counts with at most ``most``; None: not known yet.
        """
        costs = self._costs
        plain = self.step(rows)
        call = costs.predict(self._phase(length + 1), 1, length + 1)
        others = self.step(rows - 1) if rows > 1 else 0.0
        if not plain or others is None:
            return None
        if call is None:
            call = self._assume_seconds(length + 1)
        if drafting is None:
            drafting = costs.predict(self.drafter, 1, length) or 0.0
        return plain, others + (call if most is None else min(call, most)) + drafting

    def _assume_seconds(self, tokens: int) -> float:
        """Seconds of a call of so many tokens as long as none is known: a step, and a quarter for each token."""
        return (1 + tokens / 4) * (self.step(1) or 0.0)


def expect_tokens(length: int, a: float) -> float:
    """Tokens that a call with ``length`` drafts commits on average, each accepted with probability ``a``."""
    return length + 1.0 if a >= 1.0 else (1.0 - a ** (length + 1)) / (1.0 - a)
