"""Mirostat draws what the paper's algorithms draw, transcribed here in float64, and holds surprise at its target."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.mirostat import Mirostat1, Mirostat2, zipf_exponent

# Bits by which mu may differ after 100 steps: each adds the float32 error of one log-probability.
MU_TOLERANCE = 1e-4
# A chi-square statistic more than 5 standard deviations above its mean: 3e-7 for a sampler that is right.
CHI_SQUARE_DEVIATIONS = 5.0
# Bits between the mean surprise of 3,000 tokens and the target. The mean misses it by the change of mu over their
# number and eta, at most a few hundredths; it does not depend on how the draws fall.
SURPRISE_TOLERANCE = 0.1

Sampler = Mirostat1 | Mirostat2
VERSIONS: list[Callable[[float, float], Sampler]] = [Mirostat1, Mirostat2]


def probabilities64(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def kept1(p: np.ndarray, mu: float, m: int = 100) -> np.ndarray:
    """Algorithm 1: estimate s from the m most probable tokens, compute k, keep the top k."""
    descending = np.sort(p[p > 0])[::-1]
    m = min(m, descending.size)
    numerator = denominator = 0.0
    for i in range(1, m):
        t, b = math.log((i + 1) / i), math.log(descending[i - 1] / descending[i])
        numerator += t * b
        denominator += t * t
    s = numerator / denominator
    epsilon = s - 1
    k = round((epsilon * 2**mu / (1 - p.size ** (-epsilon))) ** (1 / s))
    return p >= descending[min(max(k, 1), descending.size) - 1]


def kept2(p: np.ndarray, mu: float) -> np.ndarray:
    """Algorithm 2: cut the tokens whose surprise exceeds mu, but the most probable."""
    with np.errstate(divide="ignore"):
        return (-np.log2(p) <= mu) | (p == p.max())


class Transcription:
    def __init__(self, kept: Callable[[np.ndarray, float], np.ndarray], tau: float, eta: float) -> None:
        self.kept, self.tau, self.eta, self.mu = kept, tau, eta, 2 * tau

    def __call__(self, logits: np.ndarray, number: float) -> int:
        p = probabilities64(logits)
        remaining = np.where(self.kept(p, self.mu), p, 0.0)
        cumulative = np.cumsum(remaining / remaining.sum())
        token = min(int(cumulative.searchsorted(number, side="right")), p.size - 1)
        self.mu -= self.eta * (-math.log2(p[token]) - self.tau)
        return token


def make_logits(size: int, deviation: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


def run(sampler: Callable[[np.ndarray, float], int], steps: int, size: int, deviation: float, seed: int) -> list[int]:
    return [sampler(make_logits(size, deviation, seed * 1000 + step), uniform(seed, step, 0)) for step in range(steps)]


@pytest.mark.parametrize(("version", "kept"), [(Mirostat1, kept1), (Mirostat2, kept2)])
class TestBothVersions:
    @pytest.mark.parametrize(("tau", "eta"), [(3.0, 1.0), (5.0, 0.1), (1.0, 0.3)])
    @pytest.mark.parametrize(("size", "deviation"), [(50, 1.0), (500, 3.0), (4000, 2.0)])
    def test_draw_the_tokens_of_the_transcription(
        self, version: type[Sampler], kept: Callable[..., np.ndarray], tau: float, eta: float, size: int,
        deviation: float,
    ) -> None:  # fmt: skip
        sampler, expected = version(tau, eta), Transcription(kept, tau, eta)
        for step in range(100):
            logits, number = make_logits(size, deviation, step), uniform(3, step, 0)
            assert sampler(logits, number) == expected(logits, number)
        assert sampler.mu == pytest.approx(expected.mu, abs=MU_TOLERANCE)

    def test_with_another_rate_fail_that_check(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        sampler, expected = version(3.0, 0.1), Transcription(kept, 3.0, 0.101)
        for draw in (sampler, expected):
            run(draw, 20, 500, 3.0, 1)
        assert sampler.mu != pytest.approx(expected.mu, abs=MU_TOLERANCE)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        size=st.sampled_from([2, 10, 300, 3000]),
        deviation=st.sampled_from([0.5, 2.0, 10.0]),
        seed=st.integers(0, 9999),
        mu=st.floats(-1.0, 14.0),
        masked=st.booleans(),
    )
    def test_keep_the_tokens_of_the_transcription(
        self, version: type[Sampler], kept: Callable[..., np.ndarray], size: int, deviation: float, seed: int,
        mu: float, masked: bool,
    ) -> None:  # fmt: skip
        logits = make_logits(size, deviation, seed)
        if masked and size > 5:
            logits[5:] = -np.inf
        sampler = version(1.0, 1.0)
        sampler.mu = mu
        found = sampler.truncated(logits)
        p = probabilities64(logits)
        near = [kept(p, mu + sign * MU_TOLERANCE) & (p > 0) for sign in (-1, 1)]
        assert (near[0] <= np.isfinite(found)).all() and (np.isfinite(found) <= near[1]).all()
        assert np.array_equal(found[np.isfinite(found)], logits[np.isfinite(found)])
        assert sampler.mu == mu

    def test_draw_in_proportion_to_what_is_kept(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        logits = make_logits(300, 2.0, 0)
        p = np.where(kept(probabilities64(logits), 6.0), probabilities64(logits), 0.0)
        sampler = version(3.0, 0.0)  # a rate of 0 keeps mu, so that all draws are from one distribution
        counts = np.bincount([sampler(logits, uniform(5, i, 0)) for i in range(5000)], minlength=300)
        assert chi_square_deviations(counts, p / p.sum()) < CHI_SQUARE_DEVIATIONS
        assert chi_square_deviations(counts, probabilities64(logits)) > CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize(("tau", "deviation"), [(1.5, 4), (2.0, 3), (4.0, 1)])  # out of reach for flatter ones
    def test_hold_the_mean_surprise_at_the_target(
        self, version: type[Sampler], kept: Callable[..., np.ndarray], tau: float, deviation: int
    ) -> None:
        sampler, surprises = version(tau, 0.1), []
        for step in range(3000):
            logits = make_logits(400, deviation + step % 3, step)
            p = probabilities64(logits)
            surprises.append(-math.log2(p[sampler(logits, uniform(1, step, 0))]))
        assert np.mean(surprises) == pytest.approx(tau, abs=SURPRISE_TOLERANCE)
        assert np.mean(surprises) != pytest.approx(tau + 0.2, abs=SURPRISE_TOLERANCE)

    def test_resume_from_mu(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        first, second = version(3.0, 0.5), version(3.0, 0.5)
        run(first, 10, 200, 2.0, 1)
        second.mu = first.mu
        assert run(first, 10, 200, 2.0, 2) == run(second, 10, 200, 2.0, 2)
        assert first.mu == second.mu

    def test_leave_the_logits_as_they_are(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        logits = make_logits(200, 2.0, 0)
        before = logits.copy()
        version(3.0, 0.1)(logits, 0.5)
        version(3.0, 0.1).truncated(logits)
        assert np.array_equal(logits, before)

    @pytest.mark.parametrize("mu", [-1e6, -1.0, 0.0, 1e6])
    @pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
    def test_draw_a_possible_token_whatever_mu(
        self, version: type[Sampler], kept: Callable[..., np.ndarray], mu: float, number: float
    ) -> None:
        logits = np.full(200, -np.inf, np.float32)
        logits[50:60] = make_logits(10, 30.0, 0)
        sampler = version(3.0, 0.1)
        sampler.mu = mu
        token = sampler(logits, number)
        assert 50 <= token < 60 and (mu > 0 or token == logits.argmax())

    def test_draw_the_only_possible_token(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        logits = np.full(200, -np.inf, np.float32)
        logits[7] = 1.0
        for mu in (-5.0, 6.0):
            sampler = version(3.0, 0.1)
            sampler.mu = mu
            assert sampler(logits, 0.99) == 7
            assert sampler.mu == pytest.approx(mu + 0.1 * 3.0)
        assert version(3.0, 0.1)(np.zeros(1, np.float32), 0.5) == 0

    def test_keep_equals_together(self, version: type[Sampler], kept: Callable[..., np.ndarray]) -> None:
        logits = np.random.default_rng(0).integers(0, 4, 300).astype(np.float32)
        for mu in np.linspace(0.0, 12.0, 25):
            sampler = version(3.0, 0.1)
            sampler.mu = float(mu)
            found = np.isfinite(sampler.truncated(logits))
            assert all(np.unique(found[logits == level]).size == 1 for level in range(4))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_refuse_logits_without_a_peak(
        self, version: type[Sampler], kept: Callable[..., np.ndarray], bad: float
    ) -> None:
        with pytest.raises(RequestError):
            version(3.0, 0.1)(np.full(3, bad, np.float32), 0.5)


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.5])
def test_the_exponent_of_zipfs_law_is_found(exponent: float) -> None:
    logits = (-exponent * np.log(np.arange(1, 5001))).astype(np.float32)
    assert zipf_exponent(np.random.default_rng(0).permutation(logits), 100) == pytest.approx(exponent, rel=1e-5)


@pytest.mark.parametrize("exponent", [0.9, 1.0, 1.2])
def test_version_1_bounds_the_surprise_of_zipfs_law(exponent: float) -> None:
    """The k it takes is the rank whose surprise is about mu: Zipf's law is what the formula is derived from."""
    logits = (-exponent * np.log(np.arange(1, 5001))).astype(np.float32)
    sampler = Mirostat1(3.0, 0.1)
    least = np.isfinite(sampler.truncated(logits)).sum()
    surprise = -math.log2(probabilities64(logits)[least - 1])
    assert surprise == pytest.approx(sampler.mu, abs=0.5)  # the formula takes an integral for the sum over ranks


def chi_square_deviations(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations between the chi-square statistic and its mean; rare tokens are pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = (observed > 0) | (expected > 0)
    freedom = np.count_nonzero(possible) - 1
    with np.errstate(divide="ignore"):  # a token that cannot be drawn and was makes it infinite
        statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)
