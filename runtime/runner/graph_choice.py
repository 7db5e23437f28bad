"""The faster graph for a step of so many rows, found out while steps run.

Which graph is faster from how many rows on depends on the processor and on the engine's version. So the two are
compared where it matters: two steps of the same rows, one after the other, take a graph each, and what the pair took is
remembered. A few pairs decide, and now and then another one may change that. Nothing is computed that is not needed.
"""

import statistics
from collections import defaultdict, deque

from llmc.runtime.sessions import Phase

# Pairs that decide, of the last so many; an interrupted step makes one of them wrong, and the first pays for memory
# that the graph did not use before.
PAIRS, REMEMBERED = 3, 5
# Steps of the same number of rows between two pairs once that is decided: the slower graph costs less than 0.2 %.
STEPS_BETWEEN = 512
# A graph takes the place of the other where it needs at most this share of the time: ratios are noisy.
GAIN = 0.97


class GraphChoice:
    """Chooses between decode's graph and prefill's for steps of one token per row. Not thread-safe.

    Args:
        prefill_from: rows from which prefill's graph is taken as long as nothing is known.
    """

    def __init__(self, prefill_from: int) -> None:
        self._prefill_from = prefill_from
        self._rows: defaultdict[int, _Trials] = defaultdict(_Trials)

    def assumed(self, rows: int) -> Phase:
        """The graph by what is known beforehand: the same one every time."""
        return Phase.PREFILL if rows >= self._prefill_from else Phase.DECODE

    def best(self, rows: int) -> Phase:
        """The graph that is thought to be faster."""
        return self._rows[rows].best or self.assumed(rows)

    def next(self, rows: int) -> Phase:
        """The graph that the next step runs on: mostly the best one."""
        best = self.best(rows)
        return other(best) if self._rows[rows].wants_other(best) else best

    def observe(self, phase: Phase, rows: int, seconds: float) -> None:
        """Learn that a step of so many rows took ``seconds`` on the graph of ``phase``."""
        self._rows[rows].observe(phase, seconds, self.best(rows))


class _Trials:
    """Pairs of steps of one number of rows."""

    def __init__(self) -> None:
        self.best: Phase | None = None
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)  # prefill's seconds over decode's
        self._first: tuple[Phase, float] | None = None  # of a pair
        self._steps = 0

    def wants_other(self, best: Phase) -> bool:
        """True if the second step of a pair is due."""
        return self._first is not None and self._first[0] is best

    def observe(self, phase: Phase, seconds: float, best: Phase) -> None:
        self._steps += 1
        if self._first is None or self._first[0] is phase:
            due = len(self._ratios) < PAIRS or self._steps >= STEPS_BETWEEN
            self._first = (phase, seconds) if due and phase is best else None
            return
        taken = {self._first[0]: self._first[1], phase: seconds}
        self._first, self._steps = None, 0
        self._ratios.append(taken[Phase.PREFILL] / taken[Phase.DECODE] if taken[Phase.DECODE] else 1.0)
        if len(self._ratios) >= PAIRS:
            ratio = statistics.median(self._ratios)
            gained = ratio if best is Phase.DECODE else 1 / ratio if ratio else 1.0
            self.best = other(best) if gained <= GAIN else best


def other(phase: Phase) -> Phase:
    """The other graph."""
    return Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL
