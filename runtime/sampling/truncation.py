"""Truncations: each sets the logits of the tokens that it cuts to -inf, in place, and leaves the others as they are.

All take float32 logits [V] and one number (:func:`xtc` some more), and return the same array; who wants everything kept
calls none of them. Tokens that are already -inf count as impossible. Three promises hold for all of them:

* *Something stays.* The most probable token always does, except under :func:`typical`, whose rule may cut it in favour
  of others.
* *Exact.* Arithmetic is float32 over the vocabulary, with sums in float64: only a token within about 1e-6 of an edge
  (of probability or of mass) may fall on the other side of it. Nothing is sampled or approximated.
* *Fair.* Tokens equally probable, to what float32 can tell, stay or go together.

Every function raises RequestError if the logits hold NaN or +inf, or nothing but -inf.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.masses import EXPONENTIAL, LOG_BASE, Logits, check_peak, largest

# exp(-87) is the smallest power that float32 holds in full; beyond it vector exponentials fall back to slow code.
_FARTHEST = 87.0
_NEVER_IMPOSSIBLE = np.nextafter(np.float32(_FARTHEST), np.float32(0))
# Up to this many tokens, one sort is as fast as looking for candidates.
_SORTED = 2048
_ROWS = 64  # of the grid whose columns' peaks say where candidates begin
_NEAR = 90  # about one token in so many lies closer to the peak than half of the columns' peaks do
# Up to one token in so many is kept by writing it anew; more, by subtracting infinity from the others.
_KEPT_APART = 16
_BINS_PER_NAT = 32.0  # a power of two, so that a bin's ends are exact
_PIECE = 16_000  # tokens
_PLUS_INFINITY = np.int32(0x7F800000)  # float32 +inf as bits


class Distribution(NamedTuple):
    """Probabilities from logits: token t has probability ``weights[t] / total``.

    ``distances`` [V] are peak - logit, in nats, and stop at 87; ``weights`` [V] are exp(-distances), so a token that
    is impossible counts for 1e-38 of the most probable one, which float64 sums do not see.
    """

    peak: float
    distances: Logits
    weights: Logits
    total: float

    def mean_distance(self) -> float:
        """The expected distance of a token drawn, in nats: entropy less the surprise of the most probable token."""
        return float(np.add.reduce(self.weights * self.distances, dtype=np.float64)) / self.total

    def distance_of(self, probability: float) -> float:
        """Distance from the peak at which tokens of this probability (from 0) lie, negative if it is less probable."""
        return math.inf if probability == 0 else -math.log(probability) - math.log(self.total)


def distribution(logits: Logits) -> Distribution:
    """Weigh the tokens of ``logits`` (float32 [V], left as they are).

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    peak = logits.max()
    check_peak(float(peak))
    with np.errstate(over="ignore"):  # logits at both ends of float32 are infinitely far apart
        distances = peak - logits
    if distances.max() > _FARTHEST:
        np.minimum(distances, np.float32(_FARTHEST), out=distances)
    weights = distances * np.float32(-1.0 / LOG_BASE)
    EXPONENTIAL(weights, out=weights)
    return Distribution(float(peak), distances, weights, float(np.add.reduce(weights, dtype=np.float64)))


# ------------------------------------------------------------------------------------------------------ truncations


def top_k(logits: Logits, k: int) -> Logits:
    """Keep the ``k`` most probable tokens and their equals; k is from 1 to below V."""
    return _keep_tokens(logits, largest(logits, k))


def top_p(logits: Logits, p: float) -> Logits:
    """Keep a token if those strictly more probable hold less than the mass ``p``, above 0 and below 1.

    Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
    """
    weighed = distribution(logits)
    return _keep(logits, weighed.distances <= _edge(weighed, 0.0, p * weighed.total))


def min_p(logits: Logits, ratio: float) -> Logits:
    """Keep tokens at least ``ratio`` times as probable as the most probable one, above 0 and up to 1.

    Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
    """
    peak = float(logits.max())
    check_peak(peak)
    return _keep(logits, logits >= _float32(peak + min(0.0, math.log(ratio))))


def typical(logits: Logits, mass: float) -> Logits:
    """Keep the tokens whose surprise is closest to the entropy, until they hold ``mass``.

    A token stays if those strictly closer hold less than the mass, above 0 and below 1. The most probable token goes
    if it is too predictable, as the paper wants; the closest one always stays.
    Meister et al., Locally Typical Sampling, https://arxiv.org/abs/2202.00666
    """
    weighed = distribution(logits)
    centre = weighed.mean_distance()  # the token whose surprise is the entropy lies here
    edge = _edge(weighed, centre, mass * weighed.total)
    return _keep(logits, _deviations(weighed.distances, centre) <= edge)


def top_n_sigma(logits: Logits, n: float) -> Logits:
    """Keep logits at most ``n`` standard deviations below the largest, above 0.

    The deviation is that of the whole population of finite logits (dividing by their number). Temperature, which scales
    it as it scales distances, does not change what is kept.
    Tang et al., Top-nσ: Not All Logits Are You Need, https://arxiv.org/abs/2411.07641
    """
    peak = float(logits.max())
    check_peak(peak)
    return _keep(logits, logits >= _float32(peak - n * standard_deviation(logits)))


def xtc(logits: Logits, probability: float, threshold: float, uniform: float, protected: Collection[int]) -> Logits:
    """Exclude top choices: with the given probability, set the tokens that reach ``threshold`` but the least probable
    of them to -inf.

    Nothing happens if fewer than two tokens reach the threshold, nor if a protected token would go: the
    author's rule, which keeps line ends and the end of the text in their place. Where several tokens are the least
    probable that reach it, all of them stay.

    Args:
        logits: float32 [V]; -inf is impossible.
        probability: of taking action, from 0 (never) to 1 (always).
        threshold: probability that marks a top choice, from 0; above 0.5 nothing can happen.
        uniform: the random number that decides, in [0, 1): below ``probability`` is action.
        protected: tokens, such as line end and end of sequence; a request protects the checkpoint's end-of-sequence
            tokens only, for in many vocabularies line ends are part of many tokens.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335; llama.cpp has the same rule without
    protection, https://github.com/ggml-org/llama.cpp/pull/9742

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    if uniform >= probability or threshold > 0.5:
        check_peak(float(logits.max()))
        return logits
    weighed = distribution(logits)
    limit = weighed.distance_of(threshold)
    choices = np.flatnonzero((weighed.distances <= np.float32(limit)) & (logits > -np.inf))
    if choices.size < 2:
        return logits
    values = logits.take(choices)
    excluded = choices.compress(values > values.min())
    if not np.isin(excluded, list(protected)).any():
        logits[excluded] = -np.inf
    return logits


# ------------------------------------------------------------------------------------------------------- arithmetic


def standard_deviation(logits: Logits) -> float:
    """Of the finite logits, as a population; 0 for one."""
    values = logits if math.isfinite(float(logits.min())) else logits.take(np.flatnonzero(np.isfinite(logits)))
    mean = float(np.add.reduce(values, dtype=np.float64)) / values.size
    # Differences of values near 1e38 overflow float32, and so would their squares far below that.
    residuals = values.astype(np.float64)
    residuals -= mean
    np.square(residuals, out=residuals)
    return math.sqrt(float(np.add.reduce(residuals)) / values.size)


def _float32(threshold: float) -> np.float32:
    """Rounded as logits are; thresholds below float32 become -inf, which keeps all."""
    with np.errstate(over="ignore"):
        rounded: np.float32 = np.float32(threshold)
    return rounded


def _keep(logits: Logits, kept: npt.NDArray[np.bool_]) -> Logits:
    """Set the logits not ``kept`` to -inf.

    Assigning through a mask takes 0.5 ms for 150,000 tokens, as branches on it are hard to predict; both ways here
    take a tenth of that.
    """
    number = np.count_nonzero(kept)
    if number == logits.size:
        return logits
    if number * _KEPT_APART < logits.size:
        return _keep_tokens(logits, np.flatnonzero(kept))
    bits = np.logical_not(kept).astype(np.int32)
    np.multiply(bits, _PLUS_INFINITY, out=bits)
    np.subtract(logits, bits.view(np.float32), out=logits)
    return logits


def _keep_tokens(logits: Logits, tokens: npt.NDArray[np.intp]) -> Logits:
    values = logits.take(tokens)
    logits.fill(-np.inf)
    logits[tokens] = values
    return logits


def _deviations(distances: Logits, centre: float) -> Logits:
    deviations: Logits = distances - np.float32(centre)
    np.abs(deviations, out=deviations)
    return deviations


def _edge(weighed: Distribution, centre: float, needed: float) -> np.float32:
    """The least deviation of distances from ``centre`` (from 0) within which tokens hold a mass of ``needed``.

    Tokens near the peak are tried first: none of the others deviates by less than the farthest of them.
    """
    distances, weights = weighed.distances, weighed.weights
    if distances.size > _SORTED and needed * _NEAR < distances.size:  # no token weighs more than 1
        rows = distances[: distances.size // _ROWS * _ROWS].reshape(_ROWS, -1)
        closest = np.minimum.reduce(rows, axis=0)
        reach = np.partition(closest, closest.size // 2)[closest.size // 2]  # takes in one token in _NEAR
        reach = min(reach, _NEVER_IMPOSSIBLE)
        near = np.flatnonzero(distances <= reach)
        deviations = _deviations(distances.take(near), centre)
        known = np.flatnonzero(deviations <= reach - np.float32(centre))
        deviations, near_weights = deviations.take(known), weights.take(near.take(known))
        if float(np.add.reduce(near_weights, dtype=np.float64)) >= needed:
            return _edge_in_bins(deviations, near_weights, needed)
    return _edge_in_bins(_deviations(distances, centre), weights, needed)


def _edge_in_bins(deviations: Logits, weights: Logits, needed: float) -> np.float32:
    """The least of ``deviations`` within which there is the mass ``needed``: a bin that it falls into, then a sort."""
    if deviations.size > _SORTED:
        cumulative = _masses_in_bins(deviations, weights).cumsum()
        edge_bin = _crossing(cumulative, needed)
        needed -= float(cumulative[edge_bin - 1]) if edge_bin else 0.0
        low, high = np.float32(edge_bin / _BINS_PER_NAT), np.float32((edge_bin + 1) / _BINS_PER_NAT)
        inside = np.flatnonzero((deviations >= low) & (deviations < high))
        deviations, weights = deviations.take(inside), weights.take(inside)
    order = np.argsort(deviations)
    cumulative = weights.take(order).astype(np.float64).cumsum()
    edge: np.float32 = deviations[order[_crossing(cumulative, needed)]]
    return edge


def _masses_in_bins(deviations: Logits, weights: Logits) -> npt.NDArray[np.float64]:
    """Sums of weights, by deviation; a piece at a time, as large scratch arrays cost more than the sums."""
    masses = np.zeros(int(_FARTHEST * _BINS_PER_NAT) + 1)
    for start in range(0, deviations.size, _PIECE):
        piece = slice(start, start + _PIECE)
        bins = (deviations[piece] * np.float32(_BINS_PER_NAT)).astype(np.int32)
        masses += np.bincount(bins, weights[piece], masses.size)
    return masses


def _crossing(cumulative: npt.NDArray[np.float64], needed: float) -> int:
    """The index at which ``cumulative`` first reaches ``needed``, or its end if rounding left that just below."""
    return int(cumulative.searchsorted(min(needed, float(cumulative[-1]))))
