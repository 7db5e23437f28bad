"""Distance of logits from reference logits of the same positions, with standard errors."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import PhaseQuality
from llmc.optimize.judge.quality import Tally


@dataclass(frozen=True)
class Score:
    """Figures over all scored positions, and KL(reference || candidate) of each in nats, [windows, length - 1].

    The first token of a window has nothing before it, so it is never scored, and the logits after the last token
    predict nothing in the window, so they are left out.
    """

    quality: PhaseQuality
    kl: NDArray[np.float64]


def score(
    reference: Iterable[NDArray[np.float32]], candidate: Iterable[NDArray[np.float32]], windows: NDArray[np.int64]
) -> Score:
    """Compare logits [length, V] of each window of tokens [windows, length].

    Raises:
        ValueError: one side has fewer windows or other shapes, or a candidate's logits are not finite.
    """
    tally = Tally()
    for wanted, found, tokens in zip(reference, candidate, windows, strict=True):
        if found.shape != wanted.shape:
            raise ValueError(f"logits have the shape {found.shape}, the reference's {wanted.shape}")
        if not np.isfinite(found).all():
            raise ValueError("logits are NaN or infinite")
        tally.compare(wanted[:-1], found[:-1])
        tally.predict(found[:-1], tokens[1:])
    return Score(tally.quality, tally.kl.reshape(len(windows), -1))


def ratio(ours: Score, theirs: Score) -> tuple[float, float]:
    """Mean KL of ``ours`` over that of ``theirs``, and the standard error of that ratio.

    Both saw the same windows, so the error is that of paired means over windows, whose positions are not independent
    (the ratio estimator of survey sampling: Cochran, Sampling Techniques, 1977, section 6.4).
    """
    a, b = ours.kl.mean(axis=1), theirs.kl.mean(axis=1)
    if not b.mean():
        return float("nan"), float("nan")
    value = a.mean() / b.mean()
    error = np.std(a - value * b, ddof=1) / np.sqrt(len(a)) / b.mean() if len(a) > 1 else np.nan
    return float(value), float(error)
