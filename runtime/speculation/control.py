"""The number of tokens to draft: as many as are expected to win, within what drafting may still lose."""

from bisect import bisect_left
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
"""Tokens' worth of time that drafting may lose before anything was won: a sequence, and an engine as a whole."""
ALLOWANCE = 0.005
"""Share of a token's time that each token without drafts adds to that."""
MOST = 10.0
"""Tokens' worth of time up to which that is saved, and winnings are; and debts, which an interrupted drafter makes."""
MOST_AT_FIRST = 1.0
"""Tokens' worth of time beyond its stake that the first call of a shape is booked with: it may have paid for what later
ones reuse."""
MARGIN = 1.05
"""Speculation must be expected to win by this factor: costs are noisy, and rows that join a batch have a price."""
LENIENCE = 0.9
"""The same for a drafter's surest guesses while past winnings pay: estimates are noisy too, and where guesses cost time
a wrong stop costs much."""

UNSURE = (4, 6, 14, 30)
SUREST = len(UNSURE)
"""Classes of drafts whose drafter had fewer than it was asked for, by the most that it had: prompt lookup gives two for
each token of its match, so these are matches of 2, 3, up to 7 and up to 15 tokens. All that was asked for is a class of
its own, the surest."""
PRIORS = ((0.9, 1.5), (1.05, 1.5), (1.2, 1.5), (1.275, 1.5), (1.35, 1.5))
"""Accepted and judged drafts of each class assumed before the first: between what prompt lookup has where answers copy
(0.6 to 0.97) and where they do not (0.34, 0.55, 0.55, 0.72 and 0.67), and outvoted soon."""
MEMORY = 64
"""Judged drafts over which acceptance is averaged."""
AGED, STALE = 2.0, 32
"""Judged drafts that old acceptance counts for, where none were judged for so many tokens."""
REMEASURE = 64
"""Verifications in a row after which a step without drafts is made, for its cost grows with the context."""


class Ledger:
    """The loss that drafting may still make, in tokens' worth of time: stake, a share of the time since, and winnings.

    Each sequence has one, and all of an engine share one, so that many short answers do not each lose a stake. That
    a drafter reads prompts is an account of its own, ``reading``, with the same allowance and winnings: a prompt that
    was read is paid, and no reason to draft less.
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
    tokens per second is taken, if it wins by a margin over a step without drafts. The probability is kept for each
    class of drafts, by how many the drafter had (:data:`UNSURE`).

    A call is made only if both ledgers could pay for the rejection of all its drafts. So, as far as costs are known,
    the sequences of an engine lose at most six tokens' worth of time in all, and 0.5 % of that of each token; one of
    them 1.5 and that share. Drafts that came true unverified, and would have won, let it stake as much again.

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
        self._acceptance = [_Acceptance(*prior) for prior in PRIORS]
        self.shared = ledger or Ledger()
        """What all sequences may still lose."""
        self._own = Ledger(STAKE)
        self._staked = 0.0
        self._promise = 0.0  # what drafts that came true unverified would have won since the last loss
        self._class = 0  # of the drafts that are being verified
        self._position = 0  # tokens so far
        self._streak = 0

    def length(self, rows: int = 1) -> int:
        """Drafts to ask for before the next step of a batch of ``rows`` sequences, this one included; 0 for none."""
        return self._choose_length(LONGEST, SUREST, rows)[0]

    def keep(self, had: int, asked: int, rows: int = 1) -> int:
        """The drafts to verify (the first ones) of ``had``, where ``asked`` were asked for; report them by
        :meth:`note_verified`."""
        kind = kind_of(had, asked)
        length, stake = self._choose_length(had, kind, rows)
        if length:
            self._class, self._staked = kind, stake
            self.shared.book(stake)  # not to be staked twice in a step
        return length

    def note_verified(self, proposed: int, accepted: int, rows: int = 1, seconds: float | None = None) -> None:
        """Learn how many of ``proposed`` > 0 drafts were accepted, once ``costs`` knows the call; ``seconds`` for
        drafting."""
        assert 0 <= accepted <= proposed and proposed > 0
        self._streak += 1
        self._position += accepted + 1
        self._acceptance[self._class].count(proposed, accepted, self._position)
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

    def note_watched(self, had: int, asked: int, guessed: int, right: int) -> None:
        """Learn that of ``guessed`` > 0 drafts that were not verified so many came true; the others as in ``keep``."""
        assert 0 <= right <= guessed and guessed > 0
        self._acceptance[kind_of(had, asked)].count(guessed, right, self._position)
        if both := self._seconds(guessed, 1):
            self._promise = min(max(self._promise + right + 1 - both[1] / both[0], 0.0), STAKE)

    def plain(self) -> None:
        """Learn that a step without drafts committed one token."""
        self._streak = 0
        self._position += 1
        self._own.earn()
        self.shared.earn()

    def close(self) -> None:
        self.shared.book(-self._staked)
        self._staked = 0.0

    def _choose_length(self, had: int, kind: int, rows: int) -> tuple[int, float]:
        """The best length up to ``had``, and what it could lose; 0 if it is not expected to win."""
        if self._streak >= REMEASURE:
            return 0, 0.0
        length, gain, stake = self._best(had, rows, self._acceptance[kind].share)
        bar = LENIENCE if kind == SUREST and self._own.left > STAKE else MARGIN
        return (length, stake) if gain > bar else (0, 0.0)

    def _best(self, had: int, rows: int, acceptance: float) -> tuple[int, float, float]:
        """Find the best length up to ``had``, its speed-up over no drafts, and what it could lose.

        A length that was verified once, or not for long, counts as no dearer than the settled one before it, or what is
        assumed of unknown ones: the first call of a shape may have been slow, and would be believed for ever.
        """
        best, gain, stake, settled = 0, 0.0, 0.0, None
        most = min(max(self._own.left, self._promise), self.shared.left)
        for length in LENGTHS:
            if length > had:
                break
            tokens = length + 1
            count = self._costs.count(self._phase(tokens), 1, tokens)
            both = self._seconds(length, rows, most=(settled or self._assume_seconds(tokens)) if count == 1 else None)
            if count > 1:
                settled = self._costs.predict(self._phase(tokens), 1, tokens)
            if both is None:
                continue
            ratio = both[1] / both[0]
            factor = (rows - 1 + expect_tokens(length, acceptance)) / rows / ratio
            if factor > gain and rows * (ratio - 1) <= most:
                best, gain, stake = length, factor, max(0.0, rows * (ratio - 1))
        return best, gain, stake

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


class _Acceptance:
    """The share of a class's drafts that were accepted of late."""

    def __init__(self, accepted: float, judged: float) -> None:
        self._accepted, self._judged = accepted, judged
        self._position = 0

    @property
    def share(self) -> float:
        """Probability that the next draft is accepted, from 0 to 1, as far as the past tells."""
        return self._accepted / self._judged

    def count(self, proposed: int, accepted: int, position: int) -> None:
        """Add what became of drafts, after so many tokens of the sequence."""
        judged = min(accepted + 1, proposed)  # what follows the first wrong draft was never judged
        kept = (1 - 1 / MEMORY) ** judged
        if position - self._position > STALE:
            kept = min(kept, AGED / self._judged)
        self._position = position
        self._accepted = kept * self._accepted + accepted
        self._judged = kept * self._judged + judged


def kind_of(had: int, asked: int) -> int:
    """The class of drafts whose drafter had so many of those that it was asked for: the higher, the surer."""
    return SUREST if had >= asked else bisect_left(UNSURE, had)


def expect_tokens(length: int, a: float) -> float:
    """Tokens that a call with ``length`` drafts commits on average, each accepted with probability ``a``."""
    return length + 1.0 if a >= 1.0 else (1.0 - a ** (length + 1)) / (1.0 - a)
