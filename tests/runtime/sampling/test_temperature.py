"""Temperature divides; dynamic temperature follows koboldcpp's rule, transcribed here in float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.temperature import dynamic_temperature, entropy_temperature, scaled

# Of the temperature, whose entropy is a float64 sum of float32 terms; relative.
TEMPERATURE_TOLERANCE = 2e-6
# Of probabilities, absolute: float32 logits up to 60, divided.
PROBABILITY_TOLERANCE = 1e-5


def probabilities64(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(shifted)
    return weights / weights.sum()


def temperature64(logits: np.ndarray, low: float, high: float, exponent: float) -> float:
    """Entropy over its maximum, mapped by a power to the range, as koboldcpp and llama.cpp's temp-ext do."""
    candidates = logits[np.isfinite(logits)]
    p = probabilities64(candidates)
    p = p[p > 0]
    normalized = float(-(p * np.log(p)).sum()) / -math.log(1.0 / candidates.size)
    return low + (high - low) * normalized**exponent


def make_logits(size: int, deviation: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


class TestScaled:
    @pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 1.3, 50.0])
    def test_equals_the_warper_of_transformers(self, temperature: float) -> None:
        import torch
        from transformers.generation.logits_process import TemperatureLogitsWarper

        logits = make_logits(1000, 5.0, 0)
        logits[::7] = -np.inf
        expected = TemperatureLogitsWarper(temperature)(torch.zeros(1, 0), torch.from_numpy(logits.copy())[None])
        assert np.array_equal(scaled(logits, temperature), expected[0].numpy())

    @pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-38, 1e-20])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30, -1e30])
    def test_near_0_leaves_the_mass_to_the_most_probable(self, temperature: float, scale: float) -> None:
        logits = np.array([3.0, 2.0, -np.inf, 3.0, 1.0], np.float32) * np.float32(abs(scale))
        if scale < 0:
            logits -= np.float32(10 * abs(scale))
        p = probabilities64(scaled(logits, temperature))
        np.testing.assert_allclose(p, [0.5, 0, 0, 0.5, 0], atol=PROBABILITY_TOLERANCE)

    @pytest.mark.parametrize("temperature", [1e20, 1e38, 1e300])
    def test_without_bound_makes_possible_tokens_equal(self, temperature: float) -> None:
        logits = np.array([30.0, -np.inf, -30.0], np.float32)
        p = probabilities64(scaled(logits, temperature))
        np.testing.assert_allclose(p, [0.5, 0, 0.5], atol=PROBABILITY_TOLERANCE)

    def test_divides_in_place(self) -> None:
        logits = make_logits(10, 1.0, 0)
        assert scaled(logits, 0.5) is logits

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("temperature", [0.5, 1.0])
    def test_refuses_logits_without_a_peak(self, bad: float, temperature: float) -> None:
        with pytest.raises(RequestError):
            scaled(np.full(3, bad, np.float32), temperature)


class TestDynamicTemperature:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        size=st.sampled_from([2, 3, 50, 5000]),
        deviation=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
        seed=st.integers(0, 9999),
        low=st.floats(0.1, 1.0),
        width=st.floats(0.0, 3.0),
        exponent=st.floats(0.2, 4.0),
        masked=st.booleans(),
    )
    def test_follows_the_transcription(
        self, size: int, deviation: float, seed: int, low: float, width: float, exponent: float, masked: bool
    ) -> None:
        logits = make_logits(size, deviation, seed)
        if masked and size > 3:
            logits[3::2] = -np.inf
        expected = temperature64(logits, low, low + width, exponent)
        # A power below 1 magnifies the error of a vanishing entropy, which is absolute.
        found = entropy_temperature(logits, low, low + width, exponent)
        assert found == pytest.approx(expected, rel=TEMPERATURE_TOLERANCE, abs=TEMPERATURE_TOLERANCE * (1 + width))
        result = dynamic_temperature(logits.copy(), low, low + width, exponent)
        np.testing.assert_allclose(
            probabilities64(result),
            probabilities64(logits.astype(np.float64) / expected),
            atol=PROBABILITY_TOLERANCE,
        )

    @pytest.mark.parametrize("change", [(0.51, 2.0, 1.0), (0.5, 2.01, 1.0), (0.5, 2.0, 1.01)])
    def test_of_other_parameters_fails_that_check(self, change: tuple[float, float, float]) -> None:
        logits = make_logits(1000, 3.0, 0)
        expected = temperature64(logits, 0.5, 2.0, 1.0)
        assert entropy_temperature(logits, *change) != pytest.approx(expected, rel=100 * TEMPERATURE_TOLERANCE)

    def test_is_high_where_all_tokens_are_equally_probable(self) -> None:
        assert entropy_temperature(np.zeros(50, np.float32), 0.5, 1.5, 1.0) == pytest.approx(1.5)

    def test_is_low_where_one_token_has_all_the_mass(self) -> None:
        logits = np.array([100.0, 0.0, 0.0], np.float32)
        assert entropy_temperature(logits, 0.5, 1.5, 1.0) == pytest.approx(0.5)

    def test_may_be_0(self) -> None:
        result = dynamic_temperature(np.array([200.0, 0.0, 0.0], np.float32), 0.0, 1.5, 1.0)
        np.testing.assert_allclose(probabilities64(result), [1, 0, 0], atol=PROBABILITY_TOLERANCE)

    def test_counts_possible_tokens_only(self) -> None:
        logits = np.array([0.0, -np.inf, 0.0, -np.inf], np.float32)
        assert entropy_temperature(logits, 0.5, 1.5, 1.0) == pytest.approx(1.5)

    @pytest.mark.parametrize("size", [1, 4])
    def test_leaves_the_only_possible_token(self, size: int) -> None:
        logits = np.full(size, -np.inf, np.float32)
        logits[0] = 2.0
        assert entropy_temperature(logits, 0.5, 1.5, 1.0) == 1.0
        assert np.array_equal(dynamic_temperature(logits.copy(), 0.5, 1.5, 1.0), logits)
