"""Mirostat: keep as many tokens as a bound on surprise allows, and move the bound by the surprise of each token drawn.

Basu et al., Mirostat, https://arxiv.org/abs/2007.14966. The bound ``mu`` begins at 2 tau and moves by
-eta * (surprise - tau) with every token; surprise is in bits. Version 1 is the paper's algorithm 1, with the surprise
of a token in the whole distribution. Version 2 is llama.cpp's (``llama_sampler_mirostat_v2``), with the surprise among
the tokens that stay. Nothing bounds mu: while a mask leaves one token, it moves by eta * tau a step.
"""

import math

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits, largest, weigh
from llmc.runtime.sampling.truncation import Candidates

_HEAD = 100  # most probable tokens that the exponent is estimated from
_LOG_2 = math.log(2)


class Mirostat:
    """A cut with state: call :meth:`observe` after each draw, and use one object per sequence.

    Args:
        version: 1 or 2.
        tau: target surprise, in bits.
        eta: learning rate.
        vocab_size: N of the paper's formula for k.
    """

    def __init__(self, version: int, tau: float, eta: float, vocab_size: int) -> None:
        self._version, self._tau, self._eta, self._vocab_size = version, tau, eta, vocab_size
        self.mu = 2 * tau
        self._surprises: Logits = np.zeros(0, np.float32)

    def __call__(self, candidates: Candidates, position: int) -> Candidates:
        surprises = surprise(candidates.logits)
        if self._version == 1:
            k = choose_k(self.mu, zipf_exponent(candidates.logits), self._vocab_size)
            places = largest(candidates.logits, min(k, candidates.logits.size))
            self._surprises = surprises[places]
        else:
            places = np.flatnonzero(surprises <= max(np.float32(self.mu), surprises.min()))
            self._surprises = surprise(candidates.logits[places])
        return candidates.take(places)

    def observe(self, place: int) -> None:
        """Move mu by the error of the token drawn, candidate number ``place`` of those that stayed."""
        self.mu -= self._eta * (float(self._surprises[place]) - self._tau)


def surprise(logits: Logits) -> Logits:
    """-log2 of the tokens' probabilities [n]."""
    with np.errstate(over="ignore"):  # logits at both ends of float32 are infinitely far apart
        distances = logits.max() - logits
    total = float(weigh(logits).sum(dtype=np.float64))
    bits: Logits = (distances + np.float32(math.log(total))) / np.float32(_LOG_2)
    return bits


def zipf_exponent(logits: Logits) -> float:
    """The exponent s of Zipf's law, p ~ 1 / rank**s, fitted to the most probable tokens; 0 if there is only one.

    The paper's least squares: sum(t_i b_i) / sum(t_i^2) with t_i = log((i + 1) / i) and b_i = log(p_i / p_(i + 1)).
    """
    head: npt.NDArray[np.float64] = logits[largest(logits, min(_HEAD, logits.size))].astype(np.float64)
    head = np.sort(head)[::-1][:_HEAD]
    steps = np.log1p(1 / np.arange(1, head.size))
    return float(steps @ (head[:-1] - head[1:])) / float(steps @ steps) if head.size > 1 else 0.0


def choose_k(mu: float, exponent: float, vocab_size: int) -> int:
    """k = (epsilon 2**mu / (1 - N**-epsilon)) ** (1 / s) with epsilon = s - 1, rounded down, from 1 to N.

    Computed with logarithms, which do not overflow; (1 - N**-epsilon) / epsilon tends to log N as epsilon vanishes.
    """
    if vocab_size == 1:
        return 1
    epsilon, most = exponent - 1, math.log(vocab_size)
    ratio = -math.expm1(-epsilon * most) / epsilon if abs(epsilon) > 1e-9 else most
    logarithm = mu * _LOG_2 - math.log(ratio)
    if logarithm >= most * exponent:
        return vocab_size
    return max(1, int(math.exp(logarithm / exponent))) if exponent > 0 else 1
