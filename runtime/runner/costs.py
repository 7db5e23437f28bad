"""Costs of a session's calls, learnt while it runs: seconds by the shape of a call."""

from bisect import bisect_left, insort
from collections import defaultdict, deque

WINDOW = 5
"""Last observations of a shape that the median is taken of."""
WEIGHT = 0.3
"""Weight of the newest median in the moving average: a lasting change of speed shows after some ten calls."""
OLD = 4096
"""Observations of other shapes after which a shape's own are too old to count: the machine may have been busy."""


class StepCosts:
    """An online model of seconds per call, by phase, rows and tokens per row. Not thread-safe.

    Each shape keeps the moving average of the lower median of its last five observations, so a call that the operating
    system interrupted does not show. Shapes never seen are read from the line through the nearest two known totals of
    tokens of the phase, held so that more tokens cost no less, and no more per token. The phase is any name.
    """

    def __init__(self) -> None:
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)
        self._learnt = 0

    def observe(self, phase: str, rows: int, tokens: int, seconds: float) -> None:
        """Learn that a call of ``rows`` rows, each of ``tokens`` new tokens, took ``seconds``."""
        assert rows > 0 and tokens > 0 and seconds >= 0
        self._learnt += 1
        self._phases[phase].observe(rows, tokens, seconds, self._learnt)

    def predict(self, phase: str, rows: int, tokens: int) -> float | None:
        """Seconds that a call of this shape will take; None as long as no call of the phase was seen."""
        known = self._phases[phase]
        shape = known.shapes.get((rows, tokens))
        if shape is not None:
            return shape.seconds
        return known.interpolate_seconds(rows * tokens) if known.shapes else None

    def count(self, phase: str, rows: int, tokens: int) -> int:
        """Calls of this shape that were seen, up to 5; 1 if the last was :data:`OLD` observations ago."""
        shape = self._phases[phase].shapes.get((rows, tokens))
        if shape is None:
            return 0
        return 1 if shape.is_old(self._learnt) else len(shape.last)


class _Shape:
    """One shape's last observations, and what they say."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0

    def is_old(self, now: int) -> bool:
        return now - self._seen > OLD

    def observe(self, seconds: float, now: int) -> None:
        if self.is_old(now):
            self.last.clear()
        self._seen = now
        self.last.append(seconds)
        count = len(self.last)
        median = sorted(self.last)[(count - 1) // 2]
        # A first call pays for what later ones reuse: an average that began with it would remember that for long.
        self.seconds = median if count < WINDOW else self.seconds + WEIGHT * (median - self.seconds)


class _Phase:
    """The shapes of one phase, and the same by their total number of tokens."""

    def __init__(self) -> None:
        self.shapes: dict[tuple[int, int], _Shape] = {}
        self._latest: dict[int, _Shape] = {}
        self._totals: list[int] = []

    def observe(self, rows: int, tokens: int, seconds: float, now: int) -> None:
        total = rows * tokens
        shape = self.shapes.get((rows, tokens))
        if shape is None:
            shape = self.shapes[rows, tokens] = _Shape()
            if total not in self._latest:
                insort(self._totals, total)
        shape.observe(seconds, now)
        self._latest[total] = shape

    def interpolate_seconds(self, total: int) -> float:
        """Seconds of a call of ``total`` tokens in a shape that was never seen."""
        if total in self._latest:
            return self._latest[total].seconds
        above = bisect_left(self._totals, total)
        nearest = self._totals[above - 1] if above else self._totals[0]
        seconds = self._latest[nearest].seconds
        line = proportional = seconds * total / nearest
        if len(self._totals) > 1:
            line = self._line(min(max(above, 1), len(self._totals) - 1), total)
        return min(max(line, min(seconds, proportional)), max(seconds, proportional))

    def _line(self, above: int, total: int) -> float:
        """The line through the known totals ``above - 1`` and ``above`` of the sorted ones."""
        low, high = self._totals[above - 1], self._totals[above]
        first, last = self._latest[low].seconds, self._latest[high].seconds
        return first + (last - first) * (total - low) / (high - low)
