"""Progress of long work."""

from collections.abc import Callable
from itertools import count

# Called with a step in a few words, and with the share of it that is done (0 ... 1) where that is known.
Progress = Callable[..., None]


def silent(step: str, fraction: float | None = None, /) -> None:
    """Report nothing."""


def make_counter(progress: Progress, step: str, total: int) -> Callable[[], None]:
    """A function to call after each of ``total`` parts of a step."""
    done = count(1)
    progress(step, 0.0)
    return lambda: progress(step, next(done) / total)
