"""A static activation scale covers what calibration saw, and nothing senseless becomes one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import BuildError
from llmc.optimize.quantize import static

# Half a step, and the rounding of a product.
HALF_STEP = 0.50001


def error_in_steps(value: float, scale: float) -> float:
    """The error of uint8 around 128, in steps."""
    integer = np.clip(np.rint(value / scale) + 128, 0, 255)
    return abs((float(integer) - 128) * scale - value) / scale


@given(st.floats(0, 1e6), st.floats(-1, 1))
def test_values_in_range_come_back_within_half_a_step(absmax, share):
    assert error_in_steps(absmax * share, static.activation_scale(absmax)) <= HALF_STEP


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_senseless_ranges_are_refused(value):
    with pytest.raises(BuildError, match="calibrate again"):
        static.activation_scale(value)


def test_values_out_of_range_exceed_half_a_step():
    assert error_in_steps(1.02, static.activation_scale(1.0)) > HALF_STEP
