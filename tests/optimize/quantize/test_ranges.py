"""Scales of static activations and of the int8 cache cover what calibration saw; senseless ranges are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.errors import BuildError
from llmc.optimize.quantize.ranges import activation_scale, cache_scales

# Half a step, and the rounding of a product in float32.
HALF_STEP = 0.50001

ranges = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(0, 1024, width=32)
)


def error_in_steps(value: float, scale: float) -> float:
    """The error of uint8 around 128, in steps."""
    integer = np.clip(np.rint(value / scale) + 128, 0, 255)
    return abs((float(integer) - 128) * scale - value) / scale


@given(st.floats(0, 1e6), st.floats(-1, 1))
def test_activations_in_range_come_back_within_half_a_step(absmax, share):
    assert error_in_steps(absmax * share, activation_scale(absmax)) <= HALF_STEP


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_senseless_ranges_of_activations_are_refused(value):
    with pytest.raises(BuildError, match="calibrate again"):
        activation_scale(value)


def test_activations_out_of_range_exceed_half_a_step():
    assert error_in_steps(1.02, activation_scale(1.0)) > HALF_STEP


def round_trip_error(values: np.ndarray, scales: np.ndarray) -> float:
    """Largest error of int8 values, in steps."""
    integers = np.clip(np.rint(values / scales), -127, 127)
    return float((np.abs(integers * scales - values) / scales).max())


@settings(deadline=None)
@given(ranges, st.booleans())
def test_values_in_range_come_back_within_half_a_step(absmax, per_channel):
    scales = cache_scales(absmax, per_channel=per_channel)
    assert scales.dtype == np.float32
    assert scales.shape == (absmax.shape if per_channel else (1,))
    for share in (1, -1, 0.3):
        assert round_trip_error(absmax * np.float32(share), scales) <= HALF_STEP


def test_a_scale_of_another_channel_exceeds_half_a_step():
    absmax = np.array([[1.0, 10.0]], np.float32)
    scales = cache_scales(absmax, per_channel=True)
    assert round_trip_error(absmax, scales[:, ::-1]) > HALF_STEP


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_senseless_ranges_are_refused(value, per_channel):
    absmax = np.ones((2, 4), np.float32)
    absmax[1, 2] = value
    with pytest.raises(BuildError, match="calibrate again"):
        cache_scales(absmax, per_channel=per_channel)
