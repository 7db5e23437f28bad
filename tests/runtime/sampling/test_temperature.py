"""Temperature divides; dynamic temperature follows koboldcpp's rule, transcribed here in float64."""

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime.sampling.temperature import scaled

# Of the temperature, whose entropy is a float64 sum of float32 terms; relative.
TEMPERATURE_TOLERANCE = 2e-6
# Of probabilities, absolute: float32 logits up to 60, divided.
PROBABILITY_TOLERANCE = 1e-5


def probabilities64(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(shifted)
    return weights / weights.sum()


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
