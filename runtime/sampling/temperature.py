"""The temperature, which divides logits."""

import numpy as np

from llmc.runtime.sampling.masses import Logits, check_peak

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
