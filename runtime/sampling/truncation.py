"""Cuts of a distribution: which tokens of some logits stay.

All take finite or -inf float32 logits [n] of which one is finite, leave them as they are, and return a mask of what
stays. The most probable token does, but for :func:`typical_p` and :func:`xtc`. Arithmetic is float32, with sums in
float64: only a token within about 1e-6 of an edge (of probability, of mass or of surprise) may fall on the other side
of it. Tokens equally probable stay or go together.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits, largest, weigh

Mask = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.intp]

# Up to this many weights are sorted.
_SORTED = 2048
_FARTHEST = np.float32(1e4)  # nats; a token this far below another has no weight beside it
# Quotients beyond this, or of smaller temperatures, may leave float32.
_LARGEST, _COLDEST, _HOTTEST = 1e37, 1e-30, 1e30


# Share of the sum of all weights by which that of a GPU, in float32, may be off; sums of 152,000 are off by 1e-6.
ACCURACY = 1e-5


class UndecidedError(Exception):
    """The most probable tokens do not decide what the whole row of logits would."""


class Rest(NamedTuple):
    """Tokens that are not among the candidates: ``size`` of them, no logit above ``floor``, the least candidate's, and
    weights, as multiples of the largest one, that sum to a number from ``least`` to ``most``."""

    floor: np.float32
    size: int
    least: float
    most: float

    def scale(self, logits: Logits, scaled: Logits, temperature: float) -> "Rest":
        """The rest at a temperature, which makes the candidates' ``logits`` into ``scaled``.

        Weights w become w**e. Below 1 the temperature takes most from the least of them, and above 1 a sum is largest
        where all weights are equal.
        """
        exponent = 1 / min(max(temperature, _COLDEST), _HOTTEST)
        if exponent >= 1:
            distance = float(logits.max()) - float(self.floor)
            return Rest(scaled.min(), self.size, 0.0, self.most * math.exp((1 - exponent) * distance))
        return Rest(scaled.min(), self.size, self.least, self.size * (self.most / self.size) ** exponent)


class Candidates(NamedTuple):
    """Tokens that may be drawn, by id [n], and their logits [n]; ``rest`` where others, less probable, may be, too."""

    tokens: Tokens
    logits: Logits
    rest: Rest | None = None

    def take(self, places: Tokens) -> "Candidates":
        """Those at ``places``, chosen by their logits alone: without the least of them the rest is out, too."""
        logits, rest = self.logits[places], self.rest
        return Candidates(self.tokens[places], logits, None if rest is None or logits.min() > rest.floor else rest)

    def keep(self, mask: Mask) -> "Candidates":
        return self.take(np.flatnonzero(mask))

    def keep_largest(self, k: int) -> "Candidates":
        """The ``k`` largest, and those equal to the last of them; of the rest only some may be among them."""
        found = self.take(largest(self.logits, k))
        return found if found.rest is None else found._replace(rest=found.rest._replace(least=0.0))

    def scale(self, temperature: float) -> "Candidates":
        """Divide by a temperature."""
        scaled, rest = scale(self.logits, temperature), self.rest
        return Candidates(self.tokens, scaled, rest and rest.scale(self.logits, scaled, temperature))

    def keep_nucleus(self, p: float) -> "Candidates":
        """Those that :func:`top_p` keeps. Raises UndecidedError: that depends on what the rest weighs."""
        if self.rest is None:
            return self.keep(top_p(self.logits, p))
        slack = ACCURACY * (float(weigh(self.logits).sum(dtype=np.float64)) + self.rest.most)
        kept, other = (
            top_p(self.logits, p, beyond) for beyond in (max(0.0, self.rest.least - slack), self.rest.most + slack)
        )
        if not np.array_equal(kept, other):
            raise UndecidedError
        return self.keep(kept)


def scale(logits: Logits, temperature: float) -> Logits:
    """``logits`` divided by the temperature, above 0; first shifted, where quotients would leave float32."""
    divisor = min(max(temperature, _COLDEST), _HOTTEST)
    peak = logits.max()
    with np.errstate(over="ignore"):  # a token infinitely far below the peak is impossible
        if abs(float(peak)) > _LARGEST * divisor:
            logits = logits - peak
        scaled: Logits = logits / np.float32(divisor)
    return scaled


def top_p(logits: Logits, p: float, beyond: float = 0.0) -> Mask:
    """Keep a token if those strictly more probable hold less than the mass ``p``, above 0 and below 1.

    ``beyond`` is the weight of tokens that are not among ``logits`` and no more probable than the least of them.
    Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
    """
    weights = weigh(logits)
    mass = float(weights.sum(dtype=np.float64))
    missing = (1 - p) * (mass + beyond) - beyond
    # Weights up to the pivot cannot exceed what is missing; it rules nearly all of them out, as a rule.
    kept: Mask = weights >= _find_edge(weights, weights, mass, missing, pivot=missing / weights.size)
    return kept


def typical_p(logits: Logits, p: float) -> Mask:
    """Keep a token if those whose surprise is strictly nearer to the entropy hold less than the mass ``p``.

    ``p`` is above 0 and below 1. Meister et al., Locally Typical Sampling, https://arxiv.org/abs/2202.00666
    """
    weights = weigh(logits)
    mass = float(weights.sum(dtype=np.float64))
    with np.errstate(over="ignore"):
        distances = np.minimum(logits.max() - logits, _FARTHEST)
    mean = float((weights * distances).sum(dtype=np.float64)) / mass  # here the surprise is the entropy
    deviations = np.abs(distances - np.float32(mean))
    missing = math.nextafter(p * mass, 0)  # a mass of exactly p suffices
    kept: Mask = deviations <= _find_edge(deviations, weights, mass, missing, pivot=float(deviations.mean()))
    return kept


def _find_edge(keys: Logits, weights: Logits, mass: float, missing: float, pivot: float) -> np.float32:
    """The smallest key such that the weights of all keys up to it, of ``mass`` in all, sum to more than ``missing``.

    Keys on one side of the pivot, then of the mean, are ruled out until few enough to sort remain.
    """
    while keys.size > _SORTED:
        is_large = keys > np.float32(pivot)
        large = weights.compress(is_large)
        if large.size in (0, keys.size):
            break
        small_mass = mass - float(large.sum(dtype=np.float64))
        if small_mass > missing:
            keys, weights, mass = keys.compress(~is_large), weights.compress(~is_large), small_mass
        else:
            keys, weights, mass, missing = keys.compress(is_large), large, mass - small_mass, missing - small_mass
        pivot = float(keys.mean())
    order = np.argsort(keys)
    place = int(weights[order].cumsum(dtype=np.float64).searchsorted(missing, side="right"))
    edge: np.float32 = keys[order[min(place, order.size - 1)]]
    return edge


def min_p(logits: Logits, ratio: float) -> Mask:
    """Keep tokens at least ``ratio`` times as probable as the most probable one, above 0 and up to 1.

    Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
    """
    return _keep_from(logits, -math.log(ratio))


def top_n_sigma(logits: Logits, n: float) -> Mask:
    """Keep logits at most ``n`` (above 0) standard deviations of all finite ones (the population) below the largest.

    Tang et al., Top-nσ: Not All Logits Are You Need, https://arxiv.org/abs/2411.07641
    """
    finite = logits if logits.min() > -np.inf else logits.compress(logits > -np.inf)
    return _keep_from(logits, n * float(finite.std(dtype=np.float64)))


def _keep_from(logits: Logits, distance: float) -> Mask:
    """Keep possible tokens that are no farther than this, in nats, from the largest."""
    with np.errstate(over="ignore"):  # below float32 is all that is possible
        lowest = max(np.float32(float(logits.max()) - distance), np.finfo(np.float32).min)
    kept: Mask = logits >= lowest
    return kept


def xtc(tokens: Tokens, logits: Logits, threshold: float, protected: Collection[int]) -> Mask:
    """Exclude top choices: of the ``tokens`` [n] that reach the probability ``threshold`` keep the least probable only.

    All stay where a protected one would go: the author's rule, which keeps line ends and the end of the text in their
    place. Where several tokens are the least probable that reach it, all of them stay.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335; llama.cpp has the same rule without
    protection, https://github.com/ggml-org/llama.cpp/pull/9742
    """
    weights = weigh(logits)
    reaching = (weights >= threshold * float(weights.sum(dtype=np.float64))) & (logits > -np.inf)
    excluded: Mask = reaching & (logits > logits.min(where=reaching, initial=np.inf))
    if np.isin(tokens[excluded], list(protected)).any():
        excluded[:] = False
    kept: Mask = ~excluded
    return kept
