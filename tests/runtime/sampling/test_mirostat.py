"""Mirostat draws what the paper's algorithm 1 draws, and keeps what llama.cpp's version 2 keeps, step by step."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.mirostat import Mirostat, zipf_exponent
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import Sampler, make_sampler
from llmc.runtime.sampling.truncation import Candidates

# Bits by which mu may differ after 100 steps: each adds the float32 error of one surprise.
MU_TOLERANCE = 1e-4
# Bits between the mean surprise of 2,000 tokens and the target: the mean misses it by the change of mu, a few bits,
# divided by their number and eta.
SURPRISE_TOLERANCE = 0.1
SEED = 3
STEPS = 100


def probabilities64(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


class Paper:
    """Algorithm 1 of the paper, with its equations for the exponent and k."""

    def __init__(self, tau: float, eta: float) -> None:
        self.tau, self.eta, self.mu = tau, eta, 2 * tau

    def keep(self, p: np.ndarray) -> np.ndarray:
        descending = np.sort(p[p > 0])[::-1]
        numerator = denominator = 0.0
        for i in range(1, min(100, descending.size)):
            t, b = math.log((i + 1) / i), math.log(descending[i - 1] / descending[i])
            numerator += t * b
            denominator += t * t
        s = numerator / denominator
        epsilon = s - 1
        k = (epsilon * 2**self.mu / (1 - p.size ** (-epsilon))) ** (1 / s)
        return p >= descending[int(min(max(k, 1), descending.size)) - 1]

    def surprise(self, p: np.ndarray, kept: np.ndarray, token: int) -> float:
        return -math.log2(p[token])

    def __call__(self, p: np.ndarray, number: float) -> int:
        kept = self.keep(p)
        cumulative = np.cumsum(np.where(kept, p, 0) / p[kept].sum())
        token = int(cumulative.searchsorted(number, side="right"))
        self.mu -= self.eta * (self.surprise(p, kept, token) - self.tau)
        return token


class LlamaCpp(Paper):
    """llama_sampler_mirostat_v2: cut by surprise, normalize what is left, and take the surprise from there."""

    def keep(self, p: np.ndarray) -> np.ndarray:
        return (p >= 2**-self.mu) | (p == p.max())

    def surprise(self, p: np.ndarray, kept: np.ndarray, token: int) -> float:
        return -math.log2(p[token] / p[kept].sum())


VERSIONS = {1: Paper, 2: LlamaCpp}
# What llama.cpp 0.5.0 itself kept and drew, with its seed 1234, of `recorded_logits` one after the other: the number of
# tokens after the cut, and the token.
RECORDED = {
    (3.0, 0.1): [
        *((1, 215), (10, 264), (5, 261), (2, 83), (3, 54), (2, 124), (1, 71), (10, 143), (3, 6), (6, 70), (2, 238)),
        *((3, 163), (3, 99), (3, 202), (4, 280), (2, 9), (10, 180), (7, 17), (14, 138), (18, 5), (11, 222), (17, 18)),
        *((6, 3), (40, 24), (12, 79), (7, 268), (8, 189), (19, 40), (12, 149), (7, 118), (9, 265), (15, 215)),
    ],
    (1.5, 0.6): [
        *((1, 215), (4, 40), (2, 261), (1, 83), (2, 54), (1, 124), (1, 71), (9, 187), (2, 6), (3, 70), (2, 238)),
        *((3, 163), (3, 99), (3, 202), (5, 280), (2, 9), (25, 180), (15, 134), (30, 178), (30, 5), (28, 222), (30, 18)),
        *((24, 3), (107, 75), (28, 53), (16, 268), (28, 54), (19, 40), (14, 149), (12, 12), (15, 265), (21, 215)),
    ],
}


def recorded_logits(step: int) -> np.ndarray:
    chance = random.Random(step)
    return np.array([-2.5 * math.log(-math.log(chance.random())) for _ in range(300)], np.float32)


def make_logits(size: int, deviation: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


def sampler_of(size: int, **params: Any) -> Sampler:
    return make_sampler(SamplingContext(SamplingParams(seed=SEED, **params), size, prompt_length=0))


def mu_of(sampler: Sampler) -> float:
    assert sampler._mirostat is not None
    return sampler._mirostat.mu


def follow(version: int, expected: Paper, size: int, deviation: float, temperature: float = 1.0, **params: Any) -> Any:
    """The sampler after as many steps as the reference, which drew the same tokens unless it is another algorithm."""
    sampler = sampler_of(size, mirostat=version, temperature=temperature, **params)
    for step in range(STEPS):
        logits = make_logits(size, deviation, step)
        wanted = expected(probabilities64(logits, temperature), uniform(SEED, step, 0))
        if sampler(logits, [0] * step).token != wanted:
            return None
    return mu_of(sampler)


@pytest.mark.parametrize("version", VERSIONS)
class TestBothVersions:
    @pytest.mark.parametrize(("tau", "eta", "temperature"), [(3.0, 1.0, 1.0), (5.0, 0.1, 0.7), (1.0, 0.3, 1.4)])
    @pytest.mark.parametrize(("size", "deviation"), [(50, 1.0), (500, 3.0), (4000, 2.0)])
    def test_draw_the_tokens_of_the_reference(self, version, tau, eta, temperature, size, deviation):
        expected = VERSIONS[version](tau, eta)
        mu = follow(version, expected, size, deviation, temperature, mirostat_tau=tau, mirostat_eta=eta)
        assert mu == pytest.approx(expected.mu, abs=MU_TOLERANCE)

    @pytest.mark.parametrize("wrong", [{"mirostat_eta": 0.101}, {"mirostat_tau": 3.01}], ids=str)
    def test_of_other_parameters_fail_that_check(self, version, wrong):
        expected = VERSIONS[version](3.0, 0.1)
        mu = follow(version, expected, 500, 3.0, **{"mirostat_tau": 3.0, "mirostat_eta": 0.1, **wrong})
        assert mu is None or mu != pytest.approx(expected.mu, abs=MU_TOLERANCE)

    def test_fail_the_check_of_the_other_version(self, version):
        assert follow(version, VERSIONS[3 - version](3.0, 0.3), 500, 3.0, mirostat_tau=3.0, mirostat_eta=0.3) is None

    @pytest.mark.parametrize("mu", [-1e6, -1.0, 0.0, 1e6])
    def test_draw_a_possible_token_whatever_mu(self, version, mu):
        logits = np.full(200, -np.inf, np.float32)
        logits[50:60] = make_logits(10, 30.0, 0)
        cut = Mirostat(version, 3.0, 0.1, 200)
        cut.mu = mu
        found = cut(Candidates(np.arange(200), logits), 0)
        assert set(found.tokens) <= set(range(50, 60)) and logits.argmax() in found.tokens
        assert len(found.tokens) == 1 or mu > 0

    def test_draw_the_only_possible_token_and_raise_mu(self, version):
        for size in (1, 200):
            logits = np.full(size, -np.inf, np.float32)
            logits[size // 2] = 1.0
            sampler = sampler_of(size, mirostat=version, mirostat_tau=3.0)
            assert sampler(logits, []).token == size // 2
            assert mu_of(sampler) == pytest.approx(6 + 0.1 * 3)

    def test_keep_equals_together(self, version):
        logits = np.random.default_rng(0).integers(0, 4, 300).astype(np.float32)
        cut = Mirostat(version, 3.0, 0.1, 300)
        for cut.mu in np.linspace(0.0, 12.0, 25):
            kept = np.isin(np.arange(300), cut(Candidates(np.arange(300), logits), 0).tokens)
            assert all(np.unique(kept[logits == level]).size == 1 for level in range(4))

    def test_have_a_state_of_their_own_in_every_sequence(self, version):
        context = SamplingContext(SamplingParams(seed=SEED, mirostat=version, mirostat_eta=1.0), 500, prompt_length=0)
        first, second, alone = (make_sampler(context, index) for index in (0, 1, 1))
        for step in range(20):
            logits = make_logits(500, 3.0, step)
            first(logits, [0] * step)
            assert second(logits, [0] * step) == alone(logits, [0] * step)
        assert mu_of(first) != mu_of(second) == mu_of(alone)


@pytest.mark.parametrize(("tau", "eta"), RECORDED)
def test_version_2_keeps_what_llamacpp_kept(tau, eta):
    assert keep_recorded(tau, eta) == [size for size, _ in RECORDED[tau, eta]]
    assert keep_recorded(tau, eta * 1.05) != [size for size, _ in RECORDED[tau, eta]]


def keep_recorded(tau: float, eta: float) -> list[int]:
    """Numbers of tokens after each cut, where llama.cpp's token was drawn in the step before."""
    cut, sizes = Mirostat(2, tau, eta, 300), []
    for step, (_, token) in enumerate(RECORDED[tau, round(eta, 1)]):
        found = cut(Candidates(np.arange(300), recorded_logits(step)), step)
        sizes.append(found.tokens.size)
        drawn = np.flatnonzero(found.tokens == token)
        cut.observe(int(drawn[0]) if drawn.size else 0)
    return sizes


@pytest.mark.parametrize(("tau", "deviation"), [(1.5, 4), (4.0, 1)])
def test_version_1_holds_the_mean_surprise_at_the_target(tau, deviation):
    sampler, surprises = sampler_of(400, mirostat=1, mirostat_tau=tau), []
    for step in range(2000):
        logits = make_logits(400, deviation + step % 3, step)
        surprises.append(-math.log2(probabilities64(logits)[sampler(logits, [0] * step).token]))
    assert np.mean(surprises) == pytest.approx(tau, abs=SURPRISE_TOLERANCE)
    assert np.mean(surprises) != pytest.approx(tau + 0.2, abs=SURPRISE_TOLERANCE)


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.5])
def test_the_exponent_of_zipfs_law_is_found(exponent):
    logits = (-exponent * np.log(np.arange(1, 5001))).astype(np.float32)
    assert zipf_exponent(np.random.default_rng(0).permutation(logits)) == pytest.approx(exponent, rel=1e-5)


def test_the_same_seed_draws_the_same_tokens_and_another_one_others():
    def tokens(make: Callable[[], Sampler]) -> list[int]:
        sampler = make()
        return [sampler(make_logits(500, 2.0, step), [0] * step).token for step in range(30)]

    def seeded(seed: int) -> Sampler:
        return make_sampler(SamplingContext(SamplingParams(seed=seed, mirostat=2), 500, prompt_length=0))

    assert tokens(lambda: seeded(7)) == tokens(lambda: seeded(7)) != tokens(lambda: seeded(8))
