"""Exclude top choices: now and then, leave out the tokens that everyone would pick."""

from collections.abc import Collection

import numpy as np

from llmc.runtime.sampling.masses import Logits, check_peak
from llmc.runtime.sampling.truncation import distribution


def xtc(logits: Logits, probability: float, threshold: float, uniform: float, protected: Collection[int]) -> Logits:
    """With the given probability, set all tokens that reach ``threshold`` but the least probable of them to -inf.

    In place. Nothing happens if fewer than two tokens reach the threshold, nor if a protected token would go: the
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
