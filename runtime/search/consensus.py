"""Minimum Bayes risk: of several outputs, the one that the others agree with most."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmc.errors import ProcessorError
from llmc.runtime.search.base import guarded, require

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True)
class Consensus:
    """Which candidate was chosen, and the expected similarity of each to what the model might say."""

    index: int
    scores: tuple[float, ...]


def choose(
    candidates: Sequence[Candidate],
    similarity: Callable[[Candidate, Candidate], float],
    weights: Sequence[float] | None = None,
) -> Consensus:
    """Choose the candidate with the highest expected similarity, the first among equals.

    The expectation is over the candidates themselves, the one in question included: with equal weights, samples of the
    model stand for what it believes. Kumar and Byrne, Minimum Bayes-Risk Decoding for Statistical Machine Translation,
    https://aclanthology.org/N04-1022; Eikema and Aziz, https://arxiv.org/abs/2108.04718

    Args:
        candidates: texts or tuples of token ids, at least one.
        similarity: called with (hypothesis, reference), once for each pair of values, a value with itself included; the
            higher, the more alike. Built in: :data:`~llmc.runtime.search.similarity.SIMILARITIES`.
        weights: of the candidates as references, for instance probabilities; from 0, and not all 0. Default: equal.

    Raises:
        UsageError: there are no candidates, or the weights do not fit them.
        ProcessorError: the similarity raised, or returned something else than a finite number.
    """
    require(len(candidates) > 0, "candidates", list(candidates), "at least one")
    weights = [1.0] * len(candidates) if weights is None else list(weights)
    fit = len(weights) == len(candidates) and all(0 <= weight < math.inf for weight in weights) and any(weights)
    require(fit, "weights", weights, f"{len(candidates)} finite numbers from 0, not all 0")
    masses: dict[Candidate, float] = {}
    for candidate, weight in zip(candidates, weights, strict=True):
        masses[candidate] = masses.get(candidate, 0.0) + weight / sum(weights)
    gains = {
        hypothesis: sum(mass * _checked(similarity, hypothesis, reference) for reference, mass in masses.items())
        for hypothesis in masses
    }
    scores = tuple(gains[candidate] for candidate in candidates)
    return Consensus(scores.index(max(scores)), scores)


def _checked(similarity: Callable[[Candidate, Candidate], float], first: Candidate, second: Candidate) -> float:
    value = guarded("the similarity", similarity, first, second)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ProcessorError(f"the similarity returned {value!r}, expected a finite number")
    return number
