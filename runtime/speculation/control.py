"""The number of tokens to draft: as many as pay, or none, and a look now and then whether that has changed."""

from collections.abc import Callable, Sequence

from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sessions.base import Phase

LENGTHS = (1, 3, 5, 7, 11, 15, 23, 31)
"""Draft lengths to choose from. A call has one token more, so calls are even, as kernels for pairs of rows like them,
and of few shapes, as sessions that bind buffers per shape like them."""
MARGIN = 1.05
"""Speculation must be expected to win by this factor: costs are noisy, and rows that join a batch have a price."""
LENIENCE = 0.9
"""The same while past winnings pay for it: estimates of acceptance are noisy too, and a wrong stop costs much."""

MEMORY = 64
"""Judged drafts over which acceptance is averaged."""
PRIOR = (2.1, 3.0)
"""Accepted and judged drafts assumed before the first: optimistic, and outvoted by three proposals."""
AGED = 2.0
"""Judged drafts that old acceptance still counts for when drafting is tried anew."""
TRIAL = 3
"""Drafts of a trial, which is made without knowing that it pays."""
FIRST_BUDGET = 2.0
"""Tokens' worth of time that the first trial may have lost and still go on; later ones end with any loss."""
MAX_DEBT, MAX_CREDIT = 3.0, 10.0
"""Tokens' worth of time: lost, after which drafting stops whatever the averages promise; won, that offset losses."""
MOST_LOST, MOST_LOST_AT_FIRST = 4.0, 1.0
"""Tokens' worth of time that one verification is booked with: a call that was interrupted must not end drafting for
long, nor the first call of a shape, which may pay for what later ones reuse."""
WAKING_DEBT = 1.0
"""Tokens' worth of lost time up to which drafts that came true unverified may end a pause."""
REPAYMENT = 0.02
"""Share of the time that may go into trials: the debt that one token without drafts repays."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 512
"""Tokens between trials: doubled each time that one fails."""
REMEASURE = 64
"""Verifications in a row after which a step without drafts is made, for its cost grows with the context."""


class Ledger:
    """Losses (above 0) or winnings (below) of drafting in all sequences of an engine, in tokens' worth of time.

    Shared by their :class:`DraftLength`, it keeps many short requests from each paying for a trial of its own: while it
    is above 0 no sequence begins one.
    """

    def __init__(self) -> None:
        self.debt = 0.0

    @property
    def credit(self) -> float:
        """Winnings that were not lost again."""
        return max(0.0, -self.debt)

    def book(self, lost: float) -> None:
        """Add what a verification lost or, below 0, won."""
        self.debt = min(max(-MAX_CREDIT, self.debt + lost), MAX_DEBT + MOST_LOST)

    def repay(self) -> None:
        """A token came without drafts."""
        if self.debt > 0:
            self.debt = max(0.0, self.debt - REPAYMENT)


class DraftLength:
    """Chooses how many tokens to draft for one sequence, from its acceptance so far and the measured costs.

    If each draft is accepted with probability a, independently, a call that verifies k drafts commits E(k) = (1 -
    a^(k+1)) / (1 - a) tokens (Leviathan et al., https://arxiv.org/abs/2211.17192, equation 1). The k with the most
    tokens per second wins, if it wins by a margin over a step without drafts; otherwise drafting is off.

    What is lost against steps without drafts is booked as a debt, in tokens' worth of time, and steps without drafts
    repay 2 % of a token each. Trials (a few drafts without the promise of a gain) are made at the start and after
    pauses of 32, 64, ... 512 tokens, but only free of debt, and go on while they lose nothing. So what text that nobody
    can guess costs is bounded by that share and one trial.

    Args:
        costs: measured seconds of calls; may be shared by all sequences of a session.
        drafter: the name under which ``costs`` knows the drafter's seconds, by number of drafts.
        phase: of the call that verifies with so many tokens; default: of a graph that does them all.
        lengths: draft lengths to choose from, ascending from 1.
        step: seconds of a step without drafts of so many rows, None while that is unknown; default: what ``costs``
            knows of decoding calls of that many rows with a token each. For whoever makes a step of other calls.
        ledger: shared with the other sequences; default: one of its own.
    """

    def __init__(
        self,
        costs: StepCosts,
        drafter: str = "draft",
        phase: Callable[[int], str] = lambda tokens: Phase.PREFILL,
        lengths: Sequence[int] = LENGTHS,
        step: Callable[[int], float | None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.step = step or (lambda rows: costs.predict(Phase.DECODE, rows, 1))
        """Seconds of a step without drafts by its rows."""
        self._costs = costs
        self._drafter = drafter
        self._phase = phase
        self._lengths = tuple(lengths)
        self.longest = lengths[-1]
        self._trial_length = max((n for n in lengths if n <= TRIAL), default=lengths[0])
        self._accepted, self._judged = PRIOR
        self._ledger = ledger or Ledger()
        self._own = Ledger()
        self._on_trial = True
        self._wait = FIRST_PAUSE if self._ledger.debt > 0 else 0.0
        self._pause = FIRST_PAUSE
        self._budget = FIRST_BUDGET + self._ledger.credit  # where drafting wins, an unlucky start is forgiven
        self._streak = 0

    @property
    def acceptance(self) -> float:
        """Probability that the next draft is accepted, from 0 to 1, as far as the past tells."""
        return self._accepted / self._judged

    @property
    def active(self) -> bool:
        """True while drafts are wanted, on trial or because they pay."""
        return self._wait <= 0

    def length(self, rows: int = 1) -> int:
        """Drafts to ask for before the next step of a batch of ``rows`` sequences, this one included; 0 for none."""
        return self.keep(self.longest, rows)

    def keep(self, proposed: int, rows: int = 1) -> int:
        """Of ``proposed`` drafts, how many to verify (the first ones): never more, and 0 where it does not pay."""
        if not self.active or self.step(rows) is None or self._streak >= REMEASURE:
            return 0
        if self._on_trial:
            if self._best(self.longest, rows, 1.0)[1] < 1.0:  # no length would pay even if everything were accepted
                return 0
            return max((n for n in self._lengths if n <= min(proposed, self._trial_length)), default=0)
        best, gain = self._best(proposed, rows)
        return best if gain > self._bar else 0

    def verified(self, proposed: int, accepted: int, rows: int = 1, seconds: float | None = None) -> None:
        """Learn how many of ``proposed`` > 0 drafts the model accepted, once ``costs`` knows what that took.

        ``seconds`` that this drafting took, where it is known better than from ``costs``.
        """
        assert 0 <= accepted <= proposed and proposed > 0
        self._streak += 1
        self._count(proposed, accepted)
        lost = self._lost(proposed, accepted, rows, seconds)
        self._own.book(lost)
        self._ledger.book(lost)
        if self._own.debt > MAX_DEBT + self._ledger.credit:
            self._stop()
        elif self._pays(rows, MARGIN):
            self._on_trial, self._pause = False, FIRST_PAUSE
        elif self._on_trial:
            if self._own.debt > self._budget:
                self._stop()
        elif not self._pays(rows, self._bar):
            self._stop()

    def watched(self, proposed: int, accepted: int, rows: int = 1) -> None:
        """Learn from drafts that were compared with what came instead of verified; drafting that would pay wakes up."""
        assert 0 <= accepted <= proposed and proposed > 0
        self._count(proposed, accepted)
        if not self.active and self._own.debt <= WAKING_DEBT and self._pays(rows, MARGIN):
            self._wait, self._on_trial = 0.0, False

    def plain(self, rows: int = 1) -> None:
        """Learn that a step without drafts committed one token."""
        self._streak = 0
        self._own.repay()
        self._ledger.repay()
        if self._wait > 0:
            self._wait -= 1
            if self._wait <= 0:
                self._try_again()
        elif not self._on_trial and not self._pays(rows, self._bar):
            self._stop()

    def _try_again(self) -> None:
        if self._ledger.debt > 0:
            self._wait = FIRST_PAUSE
            return
        share = min(1.0, AGED / self._judged)
        self._accepted, self._judged = self._accepted * share, self._judged * share
        self._on_trial, self._budget, self._own.debt = True, 0.0, max(0.0, self._own.debt)

    def _stop(self) -> None:
        self._wait = max(self._pause, self._own.debt / REPAYMENT)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._on_trial = False

    def _count(self, proposed: int, accepted: int) -> None:
        judged = min(accepted + 1, proposed)  # what follows the first wrong draft was never judged
        kept = (1 - 1 / MEMORY) ** judged
        self._accepted = kept * self._accepted + accepted
        self._judged = kept * self._judged + judged

    @property
    def _bar(self) -> float:
        """The gain that is enough to go on."""
        return MARGIN if self._own.debt >= 0 else LENIENCE

    def _pays(self, rows: int, bar: float) -> bool:
        return self._best(self.longest, rows)[1] > bar

    def _best(self, proposed: int, rows: int, acceptance: float | None = None) -> tuple[int, float]:
        """The best length up to ``proposed``, and how many times faster than without drafts it is.

        A length that was verified once counts as no dearer than the settled one before it, so it is tried again: the
        first call of a shape may have been slow, and would be believed for ever.
        """
        acceptance = self.acceptance if acceptance is None else acceptance
        best, gain, settled = 0, 0.0, None
        for length in self._lengths:
            if length > proposed:
                break
            count = self._costs.count(self._phase(length + 1), 1, length + 1)
            factor = self._gain(length, rows, acceptance, settled if count == 1 else None)
            if factor > gain:
                best, gain = length, factor
            if count > 1:
                settled = self._costs.predict(self._phase(length + 1), 1, length + 1)
        return best, gain

    def _gain(self, length: int, rows: int, acceptance: float, most: float | None) -> float:
        """Tokens per second of the whole batch with ``length`` drafts for this sequence, over those without.

        The sequence leaves the batch of ``rows`` for a call of its own, which counts with at most ``most`` seconds, and
        the others go on without it.
        """
        both = self._seconds(length, rows, most=most)
        if both is None:
            return 1.0
        plain, drafted = both
        return (rows - 1 + expected(length, acceptance)) / rows * plain / drafted

    def _lost(self, proposed: int, accepted: int, rows: int, seconds: float | None) -> float:
        """Tokens that steps without drafts would have made in the time of this one, over those that it made."""
        both = self._seconds(proposed, rows, seconds)
        if both is None:
            return 0.0
        plain, drafted = both
        most = MOST_LOST if self._costs.count(self._phase(proposed + 1), 1, proposed + 1) > 1 else MOST_LOST_AT_FIRST
        return min(most, rows * drafted / plain - (rows + accepted))

    def _seconds(
        self, length: int, rows: int, drafting: float | None = None, most: float | None = None
    ) -> tuple[float, float] | None:
        """Seconds of a step of the batch without drafts, and with ``length`` for this sequence; None: not known yet."""
        costs = self._costs
        plain = self.step(rows)
        call = costs.predict(self._phase(length + 1), 1, length + 1)
        others = self.step(rows - 1) if rows > 1 else 0.0
        if not plain or call is None or others is None:
            return None
        if drafting is None:
            drafting = costs.predict(self._drafter, 1, length) or 0.0
        return plain, others + (call if most is None else min(call, most)) + drafting


def expected(length: int, a: float) -> float:
    """Tokens that a call with ``length`` drafts commits on average, each accepted with probability ``a``."""
    return length + 1.0 if a >= 1.0 else (1.0 - a ** (length + 1)) / (1.0 - a)
