"""Log-probabilities of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities, in nats, where one token was chosen.

    Args:
        token: the token chosen.
        logprob: of that token, before any processor.
        top: the most probable tokens before any processor, most probable first: (token, log-probability).
        processed_logprob: of that token in the distribution it was drawn from.
        processed_top: the most probable tokens of the distribution drawn from.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    processed_logprob: float
    processed_top: tuple[tuple[int, float], ...]
