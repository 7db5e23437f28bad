"""Log-probabilities: of the chosen token, of the most probable ones, and of a prompt's tokens.

Exponentials and sums are float32, added in pairs, which puts a log-probability within about 1e-6 of the exact one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.logits import Logits, most_probable, weigh
from llmc.runtime.sampling.ranked import Ranked
from llmc.runtime.sampling.truncation import UndecidedError

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, in nats, before any processor.

    Args:
        top: the most probable tokens, most probable first, with their log-probabilities; ties are in the order of their
            ids, and impossible tokens are left out.
    """

    token: int
    logprob: float
    top: Top


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Log-probability of ``token``, and the ``top`` most probable tokens, under logits [V].
    Raises RequestError: the logits hold NaN or +inf, or nothing but -inf."""
    total = float(logits.max()) + math.log(float(weigh(logits).sum()))  # in pairs, so close to the exact sum
    most = most_probable(logits, top).tolist() if top else []
    return TokenLogprobs(
        token, float(logits[token]) - total, tuple((each, float(logits[each]) - total) for each in most)
    )


def candidate_logprobs(ranked: Ranked, token: int, top: int) -> TokenLogprobs:
    """:func:`token_logprobs` without the whole row. Raises UndecidedError: some of the ``top`` tokens are unknown."""
    candidates, total = ranked.candidates(), ranked.log_total()
    most = candidates.take(most_probable(candidates.logits, top)) if top else None
    if most is not None and most.rest is not None:
        raise UndecidedError
    listed = [] if most is None else zip(most.tokens.tolist(), most.logits.tolist(), strict=True)
    logprob = float(candidates.logits[candidates.tokens.searchsorted(token)]) - total
    return TokenLogprobs(token, logprob, tuple((each, logit - total) for each, logit in listed))


def prompt_logprobs(logits: npt.NDArray[np.float32], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of a prompt's tokens, from the logits before each.

    Args:
        logits: after each token of the prompt but the last one [n, V].
        tokens: the token that follows each of them [n].
        top: how many of the most probable tokens to report at each position.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    return [token_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True)]
