"""XTC does what its author's code does, transcribed here in float64."""

import math
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.truncation import xtc

# Relative distance from the threshold within which float32 may decide either way.
EDGE_TOLERANCE = 1e-5
# A chi-square statistic more than 5 standard deviations above its mean: 3e-7 for frequencies that are right.
CHI_SQUARE_DEVIATIONS = 5.0


def probabilities64(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def transcription(logits: np.ndarray, threshold: float, protected: Collection[int]) -> np.ndarray:
    """Sort; each token whose next one reaches the threshold goes, unless one of these is protected."""
    p = probabilities64(logits)
    order = sorted(range(p.size), key=lambda token: -p[token])
    removed = [order[rank] for rank in range(p.size - 1) if p[order[rank + 1]] >= threshold]
    result = logits.copy()
    if not set(removed) & set(protected):
        result[removed] = -np.inf
    return result


def make_logits(size: int, deviation: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 2, 5, 50, 3000]),
    deviation=st.sampled_from([0.1, 1.0, 3.0, 6.0]),
    seed=st.integers(0, 9999),
    threshold=st.sampled_from([1e-4, 0.02, 0.1, 0.3, 0.5]),
    protected=st.sampled_from([(), (0,), (1, 3)]),
)
def test_equals_the_transcription(
    size: int, deviation: float, seed: int, threshold: float, protected: tuple[int, ...]
) -> None:
    logits = make_logits(size, deviation, seed)
    if np.any(np.abs(probabilities64(logits) / threshold - 1) < EDGE_TOLERANCE):
        return
    found = xtc(logits.copy(), 1.0, threshold, 0.0, protected)
    assert np.array_equal(found, transcription(logits, threshold, protected))


def test_of_another_threshold_fails_that_check() -> None:
    logits = make_logits(50, 3.0, 0)
    assert not np.array_equal(xtc(logits.copy(), 1.0, 0.09, 0.0, ()), transcription(logits, 0.03, ()))


def test_keeps_the_least_probable_of_the_top_choices_and_the_rest() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    assert np.isfinite(xtc(logits, 1.0, 0.15, 0.0, ())).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize(("number", "acts"), [(0.0, True), (0.2999, True), (0.3, False), (0.99, False)])
def test_acts_if_the_number_is_below_the_probability(number: float, acts: bool) -> None:
    logits = np.zeros(4, np.float32)
    logits[0] = 0.5
    assert (xtc(logits, 0.3, 0.1, number, ())[0] == -np.inf) == acts


def test_is_never_taken_with_probability_0() -> None:
    logits = make_logits(10, 1.0, 0)
    assert np.array_equal(xtc(logits.copy(), 0.0, 0.0, 0.0, ()), logits)


@pytest.mark.parametrize("protected", [(1,), (3,), (1, 3), [4, 3]])
def test_does_nothing_if_a_protected_token_would_go(protected: Collection[int]) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    assert np.isfinite(xtc(logits, 1.0, 0.15, 0.0, protected)).all()


@pytest.mark.parametrize("protected", [(4,), {0, 2}])
def test_acts_if_protected_tokens_stay_anyway(protected: Collection[int]) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    assert np.isfinite(xtc(logits, 1.0, 0.15, 0.0, protected)).sum() == 3


def test_keeps_all_of_several_that_are_least_probable() -> None:
    logits = np.array([2.0, 1.0, 1.0, -9.0], np.float32)
    assert np.isfinite(xtc(logits, 1.0, 0.1, 0.0, ())).tolist() == [False, True, True, True]
    assert np.isfinite(xtc(np.zeros(2, np.float32), 1.0, 0.5, 0.0, ())).all()


def test_leaves_impossible_tokens_out_of_the_choice() -> None:
    logits = np.array([2.0, -np.inf, 1.0, -np.inf], np.float32)
    assert np.isfinite(xtc(logits, 1.0, 0.0, 0.0, ())).tolist() == [False, False, True, False]


def test_leaves_a_single_top_choice() -> None:
    logits = np.array([9.0, 0.0, -1.0], np.float32)
    assert np.isfinite(xtc(logits, 1.0, 0.1, 0.0, ())).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("number", [0.0, 0.9])
def test_refuses_logits_without_a_peak(bad: float, number: float) -> None:
    with pytest.raises(RequestError):
        xtc(np.full(3, bad, np.float32), 0.5, 0.1, number, ())


def draw_frequencies(probability: float, draws: int) -> np.ndarray:
    """How often each token is drawn by inverse CDF after XTC, with two numbers per position."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    counts = np.zeros(logits.size, int)
    for position in range(draws):
        p = probabilities64(xtc(logits.copy(), probability, 0.15, uniform(7, position, 0), ()))
        counts[min(int(p.cumsum().searchsorted(uniform(7, position, 1), side="right")), 3)] += 1
    return counts


def chi_square_deviations(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


class TestFrequencies:
    # Without action the tokens have 0.4, 0.3, 0.2, 0.1; with it, the last two share the mass two to one.
    def expected(self, probability: float) -> np.ndarray:
        return (1 - probability) * np.array([0.4, 0.3, 0.2, 0.1]) + probability * np.array([0, 0, 2, 1]) / 3

    @pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
    def test_are_the_mixture_of_both_distributions(self, probability: float) -> None:
        counts = draw_frequencies(probability, 5000)
        assert chi_square_deviations(counts, self.expected(probability)) < CHI_SQUARE_DEVIATIONS

    def test_of_another_probability_fail_that_check(self) -> None:
        counts = draw_frequencies(0.55, 5000)
        assert chi_square_deviations(counts, self.expected(0.5)) > CHI_SQUARE_DEVIATIONS
