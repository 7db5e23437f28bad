"""Temperature: fixed, or chosen at every step from how sure the model is."""

import math

import numpy as np

from llmc.runtime.sampling.masses import Logits, check_peak
from llmc.runtime.sampling.truncation import distribution

# Quotients beyond this, or of smaller temperatures, may leave float32.
_LARGEST, _COLDEST, _HOTTEST = 1e37, 1e-30, 1e30


def scaled(logits: Logits, temperature: float) -> Logits:
    """Divide ``logits`` (float32 [V]) by the temperature, any finite number from 0, in place.

    Where quotients would leave float32, all logits are first shifted so that the peak is 0, which no probability
    depends on. 0 is the limit, in which only the most probable tokens have any mass.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    peak = float(logits.max())
    check_peak(peak)
    if temperature == 1:
        return logits
    divisor = min(max(temperature, _COLDEST), _HOTTEST)
    with np.errstate(over="ignore"):  # a token infinitely far below the peak is impossible
        if abs(peak) > _LARGEST * divisor:
            np.subtract(logits, np.float32(peak), out=logits)
        np.divide(logits, np.float32(divisor), out=logits)
    return logits


def entropy_temperature(logits: Logits, low: float, high: float, exponent: float) -> float:
    """The temperature that :func:`dynamic_temperature` takes for ``logits`` (float32 [V], left as they are).

    It is low + (high - low) (H / log N)^exponent, with H the entropy of the N tokens that are possible, both in nats;
    1 where only one is possible, as there is nothing to scale.

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    weighed = distribution(logits)
    possible = np.count_nonzero(logits > -np.inf)
    if possible == 1:
        return 1.0
    share = min(weighed.entropy() / math.log(possible), 1.0)
    return float(low + (high - low) * share**exponent)


def dynamic_temperature(logits: Logits, low: float, high: float, exponent: float) -> Logits:
    """Divide ``logits`` (float32 [V]) by a temperature from ``low`` to ``high`` that rises with the entropy, in place.

    Args:
        low: temperature where one token has all the mass, from 0.
        high: temperature where all possible tokens are equally probable, from ``low``.
        exponent: of the entropy as a share of the largest possible, above 0; 1 is linear.

    Entropy is measured on the tokens that earlier steps left. Zhu et al., Hot or Cold?, https://arxiv.org/abs/2309.02772;
    the rule is that of koboldcpp and llama.cpp (temp-ext), https://github.com/ggml-org/llama.cpp/pull/4972

    Raises:
        RequestError: the logits hold NaN or +inf, or nothing but -inf.
    """
    return scaled(logits, entropy_temperature(logits, low, high, exponent))
