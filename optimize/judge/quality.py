"""Quality of a bundle against the unquantized model: KL divergence, agreement, perplexity."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import PhaseQuality

Float = NDArray[np.float32]
Double = NDArray[np.float64]

# Rows that are compared at a time: in float64 each row of a large vocabulary takes several megabytes.
ROWS = 16
# exp of more overflows float64, and more than this is useless anyway.
LARGEST_EXPONENT = 700.0


class Tally:
    """Likelihoods and comparisons of one path, or of the unquantized model, added up over texts."""

    def __init__(self) -> None:
        self._nll = 0.0
        self._predicted = 0
        self._kl: list[Double] = []
        self._same: list[NDArray[np.bool_]] = []

    def predict(self, logits: Float, targets: NDArray[np.int64]) -> None:
        """Add the log likelihoods of tokens [n] under logits [n, V]."""
        self._nll += negative_log_likelihood(logits, targets)
        self._predicted += len(targets)

    def compare(self, reference: Float, candidate: Float) -> Double:
        """Add the comparison of logits [n, V] with the reference's; return the KL in nats of each position, [n]."""
        kl, same = compare(reference, candidate)
        self._kl.append(kl)
        self._same.append(same)
        return kl

    @property
    def kl(self) -> Double:
        """KL(reference || candidate) in nats of all compared positions."""
        return np.concatenate(self._kl)

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p, at most exp(:data:`LARGEST_EXPONENT`)."""
        return math.exp(min(self._nll / max(1, self._predicted), LARGEST_EXPONENT))

    @property
    def quality(self) -> PhaseQuality:
        """The figures of a path; KL and agreement only if something was compared."""
        if not self._kl:
            return PhaseQuality(self.perplexity, None, None, None)
        kl, same = self.kl, np.concatenate(self._same)
        return PhaseQuality(self.perplexity, float(kl.mean()), float(np.percentile(kl, 99)), float(same.mean()))


def compare(reference: Float, candidate: Float) -> tuple[Double, NDArray[np.bool_]]:
    """KL(reference || candidate) in nats of logits [n, V], and whether both have the same most likely token: [n]
    each."""
    assert reference.shape == candidate.shape
    parts: list[Double] = []
    for rows in _spans(len(reference)):
        p, q = log_softmax(reference[rows]), log_softmax(candidate[rows])
        q -= p
        parts.append(-np.einsum("nv,nv->n", np.exp(p, out=p), q))
    return np.concatenate(parts), reference.argmax(axis=1) == candidate.argmax(axis=1)


def negative_log_likelihood(logits: Float, targets: NDArray[np.int64]) -> float:
    """Sum of -log p(target) in nats over logits [n, V] and targets [n]; exp of its mean is the perplexity."""
    total = 0.0
    for rows in _spans(len(targets)):
        chosen = log_softmax(logits[rows])[np.arange(len(targets[rows])), targets[rows]]
        total -= float(chosen.sum())
    return total


def log_softmax(logits: Float) -> Double:
    """Logarithm of the softmax over the last axis, in float64 so that small divergences survive."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Double = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _spans(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, rows, ROWS))
