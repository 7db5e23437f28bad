"""Distance of logits from reference logits of the same positions, with standard errors."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.optimize.judge.quality import log_softmax


@dataclass(frozen=True)
class Score:
    """Figures of every scored position, [windows, length - 1] each.

    The first token of a window has nothing before it, so it is never scored, and the logits after the last token
    predict nothing in the window, so they are left out.

    Attributes:
        kl: KL(reference || candidate) in nats.
        same: both have the same most likely token.
        nll: -log p(next token) of the candidate, in nats.
    """

    kl: NDArray[np.float64]
    same: NDArray[np.bool_]
    nll: NDArray[np.float64]

    @property
    def mean_kl(self) -> float:
        """Mean of ``kl`` in nats."""
        return float(self.kl.mean())

    @property
    def p99_kl(self) -> float:
        """99th percentile of ``kl`` in nats."""
        return float(np.percentile(self.kl, 99))

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same most likely token, 0 ... 1."""
        return float(self.same.mean())

    @property
    def perplexity(self) -> float:
        """Perplexity of the scored tokens."""
        return float(np.exp(self.nll.mean()))


def score(
    reference: Iterable[NDArray[np.float32]], candidate: Iterable[NDArray[np.float32]], windows: NDArray[np.int64]
) -> Score:
    """Compare logits [length, V] of each window of tokens [windows, length].

    Raises:
        ValueError: one side has fewer windows or other shapes, or a candidate's logits are not finite.
    """
    rows = [_window(*row) for row in zip(reference, candidate, windows, strict=True)]
    kl, same, nll = (np.stack(column) for column in zip(*rows, strict=True))
    return Score(kl, same, nll)


def _window(
    reference: NDArray[np.float32], candidate: NDArray[np.float32], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    if candidate.shape != reference.shape:
        raise ValueError(f"logits have the shape {candidate.shape}, the reference's {reference.shape}")
    if not np.isfinite(candidate).all():
        raise ValueError("logits are NaN or infinite")
    p, q = log_softmax(reference[:-1]), log_softmax(candidate[:-1])  # (L - 1, V)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return kl, p.argmax(axis=1) == q.argmax(axis=1), -q[np.arange(len(q)), tokens[1:]]


def ratio(ours: Score, theirs: Score) -> tuple[float, float]:
    """Mean KL of ``ours`` over that of ``theirs``, and the standard error of that ratio.

    Both saw the same windows, so the error is that of paired means over windows, whose positions are not independent
    (the ratio estimator of survey sampling: Cochran, Sampling Techniques, 1977, section 6.4).
    """
    a, b = ours.kl.mean(axis=1), theirs.kl.mean(axis=1)
    if not b.mean():
        return float("nan"), float("nan")
    value = a.mean() / b.mean()
    return float(value), float(np.std(a - value * b, ddof=1) / np.sqrt(len(a)) / b.mean()) if len(a) > 1 else float(
        "nan"
    )
