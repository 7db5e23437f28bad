"""Log-probabilities of tokens: of those chosen, of the most probable ones, and of a prompt's.

Exponentials are float32 and sums float64, which puts a log-probability within about 1e-6 of the exact one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError
from llmc.runtime.sampling.masses import Logits, check_peak, largest

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities, in nats, where one token was chosen.

    Args:
        token: the token chosen.
        logprob: of that token, before any processor.
        top: the most probable tokens before any processor, most probable first, with their log-probabilities. Tokens
            equally probable come in the order of their ids, and impossible ones not at all.
        processed_logprob: of that token in the distribution it was drawn from; for a greedy request in the one that
            its processors leave.
        processed_top: the most probable tokens of that distribution.
    """

    token: int
    logprob: float
    top: Top
    processed_logprob: float
    processed_top: Top


def token_logprobs(logits: Logits, token: int, top: int) -> tuple[float, Top]:
    """Log-probability of ``token``, and the ``top`` most probable tokens, under logits [V].

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    total = log_total(logits)
    return float(logits[token]) - total, _top(logits, total, top)


def log_total(logits: Logits) -> float:
    """log(sum(exp(logits))): a logit less this is the log-probability.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    peak = logits.max()
    check_peak(float(peak))
    with np.errstate(over="ignore", under="ignore"):
        weights = logits - peak
        np.exp(weights, out=weights)
    return float(peak) + math.log(float(np.add.reduce(weights, dtype=np.float64)))


def prompt_logprobs(logits: npt.NDArray[np.float32], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of a prompt's tokens, whose processed values are the unprocessed ones.

    Args:
        logits: after each token of the prompt but the last one [n, V].
        tokens: the token that follows each of them [n].
        top: how many of the most probable tokens to report at each place.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
        UsageError: not as many tokens as rows.
    """
    if len(tokens) != len(logits):
        raise UsageError(f"{len(logits)} rows of logits and {len(tokens)} tokens, expected as many; give one per token")
    found = [(token, *token_logprobs(row, token, top)) for row, token in zip(logits, tokens, strict=True)]
    return [TokenLogprobs(token, logprob, most, logprob, most) for token, logprob, most in found]


def _top(logits: Logits, total: float, count: int) -> Top:
    if count == 0:
        return ()
    tokens = largest(logits, min(count, logits.size))
    values = logits[tokens]
    order = np.lexsort((tokens, -values))[:count]
    pairs = zip(tokens[order].tolist(), values[order].tolist(), strict=True)
    return tuple((token, value - total) for token, value in pairs if value > -math.inf)
