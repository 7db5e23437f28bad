"""Mirostat: sampling that steers the surprise of the text, token by token, towards a target.

Both versions keep the tokens that a bound ``mu`` on surprise allows, draw one, and move the bound against the error:
mu -= eta * (surprise - tau), from mu = 2 tau. Surprise is in bits, -log2 of the token's probability in the whole
distribution, as in the paper and its authors' code (llama.cpp takes that of the truncated one, which is smaller).
Basu et al., Mirostat, https://arxiv.org/abs/2007.14966; https://github.com/basusourya/mirostat

A sampler's state is ``mu`` alone, and what it does depends on nothing but mu, the logits and the random number: the
same calls repeat the same tokens, and setting mu resumes from any step. Tokens equally probable stay or go together.

Nothing bounds mu, as in the paper: while the target is out of reach (a mask leaves one token, say), mu drifts by up to
eta * tau a step, and it takes as much surprise to bring it back.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.draws import pick_weighted
from llmc.runtime.sampling.masses import Logits, largest
from llmc.runtime.sampling.truncation import Distribution, distribution

HEAD = 100  # most probable tokens that the slope is estimated from
_LOG_2 = math.log(2.0)


class _Mirostat(ABC):
    """Base of both versions.

    Attributes:
        mu: the bound on surprise, in bits; it may be set, to resume.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self.mu = 2.0 * tau
        self._tau = tau
        self._eta = eta

    def __call__(self, logits: Logits, uniform: float) -> int:
        """Draw a token from ``logits`` (float32 [V], left as they are) with a random number in [0, 1); move mu.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """
        weighed = distribution(logits)
        tokens = self._kept(logits, weighed)
        token = int(tokens[pick_weighted(weighed.weights.take(tokens), uniform)])
        surprise = (weighed.peak - float(logits[token]) + math.log(weighed.total)) / _LOG_2
        self.mu -= self._eta * (surprise - self._tau)
        return token

    def truncated(self, logits: Logits) -> Logits:
        """The logits that the next token is drawn from: ``logits`` with -inf for the tokens cut, as a new array.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """
        tokens = self._kept(logits, distribution(logits))
        result = np.full_like(logits, -np.inf)
        result[tokens] = logits[tokens]
        return result

    @abstractmethod
    def _kept(self, logits: Logits, weighed: Distribution) -> npt.NDArray[np.intp]:
        """The possible tokens that mu allows, by id; at least the most probable one."""


class Mirostat1(_Mirostat):
    """Version 1: mu and the slope of the distribution's head, taken for Zipf's law, give the k of top-k.

    k is rounded to the nearest and is at least 1. The paper's formula takes N, the number of tokens, to be the whole
    vocabulary; where it has no finite value (a slope of 0), k is 1 or all.

    Args:
        tau: target surprise in bits, above 0; the paper's examples are about 3.
        eta: learning rate, above 0; 1 in the paper, 0.1 in llama.cpp.
    """

    def _kept(self, logits: Logits, weighed: Distribution) -> npt.NDArray[np.intp]:
        k = _zipf_k(self.mu, zipf_exponent(logits, HEAD), logits.size)
        return largest(logits, k) if k < logits.size else np.flatnonzero(logits > -np.inf)


class Mirostat2(_Mirostat):
    """Version 2: cuts the tokens whose surprise exceeds mu.

    Args:
        tau: target surprise in bits, above 0.
        eta: learning rate, above 0.
    """

    def _kept(self, logits: Logits, weighed: Distribution) -> npt.NDArray[np.intp]:
        limit = max(0.0, self.mu * _LOG_2 - math.log(weighed.total))
        tokens = np.flatnonzero(weighed.distances <= np.float32(limit))
        return tokens if math.isfinite(float(logits.min())) else tokens.compress(logits.take(tokens) > -np.inf)


def zipf_exponent(logits: Logits, m: int) -> float:
    """The exponent s of Zipf's law p ~ 1 / rank^s, fitted to the ``m`` most probable tokens (at most all possible).

    The paper's least squares: sum(t_i b_i) / sum(t_i^2), with t_i = log((i + 1) / i) and b_i = log(p_i / p_(i + 1)).
    0 where only one token is possible.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    head = logits.take(largest(logits, min(m, logits.size))).astype(np.float64)
    head = np.sort(head)[::-1][:m]
    ranks = np.arange(1, head.size, dtype=np.float64)
    steps = np.log1p(1.0 / ranks)
    return float(steps @ (head[:-1] - head[1:])) / float(steps @ steps) if head.size > 1 else 0.0


def _zipf_k(mu: float, exponent: float, vocab_size: int) -> int:
    """k = (epsilon 2^mu / (1 - N^-epsilon))^(1/s), where epsilon = s - 1, from 1 to N, by way of logarithms."""
    if vocab_size == 1:
        return 1
    epsilon = exponent - 1.0
    spread = epsilon * math.log(vocab_size)
    # (1 - N^-epsilon) / epsilon tends to log N where epsilon vanishes
    denominator = -math.expm1(-spread) / epsilon if abs(spread) > 1e-9 else math.log(vocab_size)
    logarithm = mu * _LOG_2 - math.log(denominator)
    largest = math.log(vocab_size)
    if logarithm >= largest * exponent:
        return vocab_size
    return max(1, round(math.exp(logarithm / exponent))) if exponent > 0 else 1
