"""How far a bundle is from the unquantized model: divergence of next-token distributions, agreement, perplexity."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Comparison:
    """Sums over positions; add comparisons of several texts and read the means.

    Attributes:
        positions: number of compared positions.
        kl: sum of KL(reference || candidate) in nats.
        agreements: positions where both have the same most likely token.
    """

    positions: int = 0
    kl: float = 0.0
    agreements: int = 0

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(self.positions + other.positions, self.kl + other.kl, self.agreements + other.agreements)

    @property
    def mean_kl(self) -> float:
        """Mean KL(reference || candidate) in nats per position."""
        return self.kl / max(1, self.positions)

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same most likely token, 0 ... 1."""
        return self.agreements / max(1, self.positions)


def compare(reference: Float, candidate: Float) -> Comparison:
    """Compare logits [n, V] of the same positions."""
    p, q = log_softmax(reference), log_softmax(candidate)
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    same = reference.argmax(axis=1) == candidate.argmax(axis=1)
    return Comparison(len(reference), float(divergence.sum()), int(same.sum()))


def negative_log_likelihood(logits: Float, targets: NDArray[np.int64]) -> float:
    """Sum of -log p(target) in nats over logits [n, V] and targets [n]; exp of its mean is the perplexity."""
    return float(-log_softmax(logits)[np.arange(len(targets)), targets].sum())


def log_softmax(logits: Float) -> NDArray[np.float64]:
    """Logarithm of the softmax over the last axis, in float64 so that small divergences survive."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
