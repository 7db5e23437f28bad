"""Static activation scales of W8A8: uint8 q = round(x / s) + 128 with one scale for a whole tensor.

The scale s = max|x| / 127 is taken from calibration, so an engine can hold it as a constant; values beyond the range
that calibration saw are clipped. One outlier channel costs all others their precision: smooth first (arXiv 2211.10438).
"""

import math

from llmc.errors import BuildError

LARGEST = 127
# An input that calibration only saw as zero.
SMALLEST = 1e-9


def activation_scale(absmax: float) -> float:
    """The scale for activations of magnitude up to ``absmax``; BuildError if that is no magnitude."""
    if not math.isfinite(absmax) or absmax < 0:
        raise BuildError(f"an activation's range is {absmax}, expected a finite magnitude; calibrate again")
    return max(absmax, SMALLEST) / LARGEST
