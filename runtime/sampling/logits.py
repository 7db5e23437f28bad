"""Logits of a vocabulary: check that they are finite, find the largest."""

import math

import numpy as np
import numpy.typing as npt

from llmc.errors import NonFiniteError

Logits = npt.NDArray[np.float32]


def check_peak(peak: float) -> None:
    """Raise NonFiniteError if the largest logit ``peak`` is not finite; NaN counts as the largest."""
    if not math.isfinite(peak):
        what = "hold NaN" if math.isnan(peak) else "hold +inf" if peak > 0 else "are all -inf"
        raise NonFiniteError(
            f"the model's logits {what}, so no token can be chosen; check the bundle with: llmc verify BUNDLE"
        )


def weigh(logits: Logits) -> Logits:
    """Probabilities of ``logits`` [V] as multiples of the largest one, a new array.
    Raises NonFiniteError: the logits hold NaN or +inf, or nothing but -inf."""
    peak = logits.max()
    check_peak(float(peak))
    with np.errstate(over="ignore", under="ignore"):  # logits at both ends of float32 are infinitely far apart
        weights: Logits = logits - peak
        np.exp(weights, out=weights)
    return weights


def largest(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """Possible tokens whose logit is at least the k-th largest, by id."""
    rows = max(1, min(128, logits.size // (2 * k)))
    columns = logits.size // rows
    blocked = logits[: rows * columns].reshape(rows, columns)  # block c: tokens c, c + columns, ...
    maxima = np.concatenate([np.maximum.reduce(blocked, axis=0), logits[rows * columns :]])
    check_peak(float(maxima.max()))
    # Impossible tokens are no candidates: selecting among that many equal values takes 30 ms.
    maxima = maxima.compress(maxima > -np.inf)
    bound = np.partition(maxima, maxima.size - k)[maxima.size - k] if maxima.size >= k else -np.inf
    candidates: npt.NDArray[np.intp] = np.flatnonzero(logits >= bound if bound > -np.inf else logits > bound)
    if candidates.size <= k:
        return candidates
    values = logits[candidates]
    smallest = np.partition(values, values.size - k)[values.size - k]
    return np.compress(values >= smallest, candidates)


def most_probable(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """The ``k`` most probable tokens, most probable first, ties by lowest id; never impossible ones."""
    candidates = largest(logits, k)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:k]]
