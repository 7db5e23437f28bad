"""Cuts of a distribution: masks of the tokens to keep.

All functions take float32 logits [n], finite or -inf with at least one finite, do not change them, and return a mask of
the tokens kept. All but :func:`typical_p` and :func:`xtc` keep the most probable token. Arithmetic is float32, with
sums in float64: only a token within about 1e-6 of an edge (of probability, mass or surprise) may fall on the wrong side
of it. Equally probable tokens are kept or dropped together.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits, largest, weigh

Mask = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.intp]

# Sort at most this many weights.
_SORTED = 2048
_FARTHEST = np.float32(1e4)  # nats; a token this far below another has no weight beside it
# Beyond this quotient, or outside these temperatures, a division may leave float32.
_LARGEST, _COLDEST, _HOTTEST = 1e37, 1e-30, 1e30


# Relative error allowed for a GPU's float32 sum of all weights; sums of 152,000 weights are off by 1e-6.
ACCURACY = 1e-5


class UndecidedError(Exception):
    """The most probable tokens cannot decide; the whole row of logits is needed."""


class Rest(NamedTuple):
    """The ``size`` tokens that are not among the candidates: no logit is above ``floor``, the smallest candidate's, and
    their weights, as multiples of the largest one, sum to a number from ``least`` to ``most``."""

    floor: np.float32
    size: int
    least: float
    most: float

    def scale(self, logits: Logits, scaled: Logits, temperature: float) -> "Rest":
        """The rest after division by a temperature, which turns the candidates' ``logits`` into ``scaled``.

        Weights w become w**e. A temperature below 1 shrinks the smallest weights most; above 1 the sum is largest if
        all weights are equal.
        """
        exponent = 1 / min(max(temperature, _COLDEST), _HOTTEST)
        if exponent >= 1:
            distance = float(logits.max()) - float(self.floor)
            return Rest(scaled.min(), self.size, 0.0, self.most * math.exp((1 - exponent) * distance))
        return Rest(scaled.min(), self.size, self.least, self.size * (self.most / self.size) ** exponent)


class Candidates(NamedTuple):
    """Tokens that may be drawn, by id [n], and their logits [n]; ``rest`` if less probable tokens may be drawn, too."""

    tokens: Tokens
    logits: Logits
    rest: Rest | None = None

    def take(self, places: Tokens) -> "Candidates":
        """The candidates at ``places``, chosen by their logits: without the smallest of them, the rest is out, too."""
        logits, rest = self.logits[places], self.rest
        return Candidates(self.tokens[places], logits, None if rest is None or logits.min() > rest.floor else rest)

    def keep(self, mask: Mask) -> "Candidates":
        return self.take(np.flatnonzero(mask))

    def keep_largest(self, k: int) -> "Candidates":
        """The ``k`` largest, with ties; the rest may hold some of them."""
        kept = self.take(largest(self.logits, k))
        return kept if kept.rest is None else kept._replace(rest=kept.rest._replace(least=0.0))

    def scale(self, temperature: float) -> "Candidates":
        scaled, rest = scale(self.logits, temperature), self.rest
        return Candidates(self.tokens, scaled, rest and rest.scale(self.logits, scaled, temperature))

    def keep_nucleus(self, p: float) -> "Candidates":
        """The tokens that :func:`top_p` keeps. Raises UndecidedError: the result depends on the weight of the rest."""
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
    """``logits`` divided by the temperature, above 0; shifted first if quotients would leave float32."""
    divisor = min(max(temperature, _COLDEST), _HOTTEST)
    peak = logits.max()
    with np.errstate(over="ignore"):  # a token infinitely far below the peak is impossible
        if abs(float(peak)) > _LARGEST * divisor:
            logits = logits - peak
        scaled: Logits = logits / np.float32(divisor)
    return scaled


def top_p(logits: Logits, p: float, beyond: float = 0.0) -> Mask:
    """Keep a token if the strictly more probable ones have a total probability below ``p``, above 0 and below 1.

    ``beyond`` is the weight of tokens that are not among ``logits``; none is more probable than the smallest logit.
    Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
    """
    weights = weigh(logits)
    mass = float(weights.sum(dtype=np.float64))
    missing = (1 - p) * (mass + beyond) - beyond
    # Weights up to the pivot cannot sum to more than `missing`; this usually rules out nearly all of them.
    kept: Mask = weights >= _find_edge(weights, weights, mass, missing, pivot=missing / weights.size)
    return kept


def typical_p(logits: Logits, p: float) -> Mask:
    """Keep a token if those with surprise strictly nearer to the entropy have a total probability below ``p``.

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
    """Smallest key such that the weights of all keys up to it sum to more than ``missing``; ``mass`` is the total.

    Rules out the keys on one side of the pivot, then of the mean, until few enough to sort remain.
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
    position = int(weights[order].cumsum(dtype=np.float64).searchsorted(missing, side="right"))
    edge: np.float32 = keys[order[min(position, order.size - 1)]]
    return edge


def min_p(logits: Logits, ratio: float) -> Mask:
    """Keep tokens with at least ``ratio`` (above 0, up to 1) times the top token's probability.

    Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
    """
    return _keep_from(logits, -math.log(ratio))


def top_n_sigma(logits: Logits, n: float) -> Mask:
    """Keep logits at most ``n`` (above 0) standard deviations, over all finite logits, below the largest.

    Tang et al., Top-nσ: Not All Logits Are You Need, https://arxiv.org/abs/2411.07641
    """
    finite = logits if logits.min() > -np.inf else logits.compress(logits > -np.inf)
    return _keep_from(logits, n * float(finite.std(dtype=np.float64)))


def _keep_from(logits: Logits, distance: float) -> Mask:
    """Keep possible tokens at most ``distance`` nats below the largest."""
    with np.errstate(over="ignore"):  # every possible token is above the lowest float32
        lowest = max(np.float32(float(logits.max()) - distance), np.finfo(np.float32).min)
    kept: Mask = logits >= lowest
    return kept


def xtc(tokens: Tokens, logits: Logits, threshold: float, protected: Collection[int]) -> Mask:
    """Exclude top choices: of the ``tokens`` [n] with at least probability ``threshold``, keep only the least probable.

    If a protected token would be dropped, all stay: the author's rule, which keeps line ends and the end of the text.
    If several tokens tie for the least probable, all of them stay.

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
