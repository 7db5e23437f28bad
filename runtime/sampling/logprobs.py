"""Log-probabilities of tokens: of those chosen, of the most probable ones, and of a prompt's.

Exponentials and sums are float32, added in pairs, which puts a log-probability within about 1e-6 of the exact one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError
from llmc.runtime.sampling.logits import Logits, most_probable, weigh

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
        rank: place of the token among all of the vocabulary, in the order of ``top`` and from 1.
        processed_rank: the same in the distribution it was drawn from.
    """

    token: int
    logprob: float
    top: Top
    processed_logprob: float
    processed_top: Top
    rank: int
    processed_rank: int


def token_rank(logits: Logits, token: int, top: Top = ()) -> int:
    """Place of ``token`` by logits [V], from 1; of tokens equally probable the one with the lower id comes first.

    Args:
        top: the most probable ones, where they are known: who is among them need not be searched for.
    """
    if (place := next((place for place, (listed, _) in enumerate(top, 1) if listed == token), 0)) > 0:
        return place
    logit = logits[token]
    return 1 + int(np.count_nonzero(logits > logit)) + int(np.count_nonzero(logits[:token] == logit))


def token_logprobs(logits: Logits, token: int, top: int) -> tuple[float, Top]:
    """Log-probability of ``token``, and the ``top`` most probable tokens, under logits [V].

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    total = float(logits.max()) + math.log(float(weigh(logits).sum()))  # in pairs, so close to the exact sum
    most = most_probable(logits, top).tolist() if top else []
    return float(logits[token]) - total, tuple((each, float(logits[each]) - total) for each in most)


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
    found = []
    for row, token in zip(logits, tokens, strict=True):
        logprob, most = token_logprobs(row, token, top)
        rank = token_rank(row, token, most)
        found.append(TokenLogprobs(token, logprob, most, logprob, most, rank, rank))
    return found
