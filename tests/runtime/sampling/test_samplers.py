import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.masses import Masses
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import GreedySampler, RandomSampler, make_sampler

# transformers works in float32 throughout, with a cumulative sum over the sorted vocabulary.
PROBABILITY_TOLERANCE = 2e-6
# A chi-square statistic more than 5 standard deviations above its mean: 3e-7 for a sampler that is right.
CHI_SQUARE_DEVIATIONS = 5.0
# Share of the total mass within which float32 may put a token on the other side of the nucleus's edge.
EDGE_TOLERANCE = 1e-5
# Difference of logits, as a share of their size, below which float32 may take two tokens for equally probable.
TIE_TOLERANCE = 1e-6

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 0.6, "min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
]


def fast_sampler(params: SamplingParams, vocab_size: int) -> GreedySampler | RandomSampler:
    sampler = make_sampler(SamplingContext(params, vocab_size, prompt_length=0))
    assert isinstance(sampler, (GreedySampler, RandomSampler))
    return sampler


def probabilities_of(sampler: GreedySampler | RandomSampler, logits: np.ndarray) -> np.ndarray:
    """The distribution that the sampler draws from."""
    result = np.zeros(logits.shape, np.float32)
    if isinstance(sampler, GreedySampler):
        result[sampler.choose(logits, 0)] = 1.0
    else:
        tokens, weights = sampler._support(logits)
        result[tokens] = weights / weights.sum()
    return result


def random_logits(size: int, deviation: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


def draw_counts(sampler: Any, logits: np.ndarray, draws: int) -> np.ndarray:
    return np.bincount([sampler.choose(logits, position) for position in range(draws)], minlength=logits.size)


def chi_square_deviations(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations between the chi-square statistic and its mean; rare tokens are pooled."""
    expected = probabilities.astype(np.float64) * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = (observed > 0) | (expected > 0)
    freedom = np.count_nonzero(possible) - 1
    with np.errstate(divide="ignore"):  # a token that cannot be drawn and was makes it infinite
        statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


class TestProbabilities:
    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    @pytest.mark.parametrize("size", [50, 1000, 4099])
    def test_equal_the_warpers_of_transformers(self, params: dict[str, Any], size: int) -> None:
        logits = random_logits(size)
        found = probabilities_of(fast_sampler(SamplingParams(**params, seed=0), size), logits)
        expected = transformers_probabilities(logits, **params)
        assert found.dtype == np.float32
        assert np.array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=PROBABILITY_TOLERANCE)

    def test_differ_when_a_parameter_differs(self) -> None:
        logits = random_logits(1000)
        found = probabilities_of(fast_sampler(SamplingParams(temperature=0.8, top_p=0.9, seed=0), 1000), logits)
        for other in ({"temperature": 0.81, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.91}):
            expected = transformers_probabilities(logits, **other)
            assert np.abs(found - expected).max() > PROBABILITY_TOLERANCE

    def test_of_greedy_are_all_on_one_token(self) -> None:
        logits = random_logits(100)
        found = probabilities_of(fast_sampler(SamplingParams(temperature=0), 100), logits)
        assert found.argmax() == logits.argmax() and found.sum() == 1.0 and np.count_nonzero(found) == 1


def transformers_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    import torch
    from transformers.generation import logits_process as warpers

    scores = torch.from_numpy(logits)[None]
    chain = [warpers.TemperatureLogitsWarper(float(temperature))]
    chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
    chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
    for warper in chain:
        scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
    result: np.ndarray = torch.softmax(scores, -1)[0].numpy()
    return result


class TestDraws:
    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    def test_follow_the_probabilities(self, params: dict[str, Any]) -> None:
        logits = random_logits(700)
        sampler = fast_sampler(SamplingParams(**params, seed=11), logits.size)
        counts = draw_counts(sampler, logits, 5000)
        assert chi_square_deviations(counts, probabilities_of(sampler, logits)) < CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize("wrong", [{"temperature": 1.1}, {"top_p": 0.85}, {"min_p": 0.05}], ids=str)
    def test_of_other_parameters_fail_that_check(self, wrong: dict[str, Any]) -> None:
        logits = random_logits(700)
        counts = draw_counts(fast_sampler(SamplingParams(seed=11, top_p=0.9), logits.size), logits, 8000)
        probabilities = probabilities_of(fast_sampler(SamplingParams(**{"top_p": 0.9, **wrong}), logits.size), logits)
        assert chi_square_deviations(counts, probabilities) > CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize(("exponential", "log_base"), [(np.exp, 1.0), (np.exp2, math.log(2))])
    def test_follow_the_probabilities_with_either_exponential(
        self, monkeypatch: pytest.MonkeyPatch, exponential: np.ufunc, log_base: float
    ) -> None:
        monkeypatch.setattr(Masses, "_EXPONENTIAL", exponential)
        monkeypatch.setattr(Masses, "_LOG_BASE", log_base)
        logits = random_logits(700)
        sampler = fast_sampler(SamplingParams(temperature=0.7, seed=12), logits.size)
        counts = draw_counts(sampler, logits, 5000)
        assert chi_square_deviations(counts, probabilities_of(sampler, logits)) < CHI_SQUARE_DEVIATIONS

    def test_follow_the_probabilities_when_one_token_is_likely_and_the_tail_is_long(self) -> None:
        logits = np.concatenate([np.array([9.0, 8.0, 7.0], np.float32), random_logits(20_000, 0.6)])
        sampler = fast_sampler(SamplingParams(temperature=0.9, top_p=0.6, seed=5), logits.size)
        counts = draw_counts(sampler, logits, 3000)
        assert chi_square_deviations(counts, probabilities_of(sampler, logits)) < CHI_SQUARE_DEVIATIONS

    @settings(max_examples=300, deadline=None)
    @given(
        logits=st.lists(
            st.one_of(st.floats(-60, 60, width=32), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=700
        ),
        temperature=st.floats(1e-3, 100),
        top_k=st.integers(0, 800),
        top_p=st.floats(1e-6, 1),
        min_p=st.floats(0, 1),
        seed=st.integers(0, 2**64 - 1),
    )
    def test_stay_inside_the_support(
        self, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> None:
        values = np.array(logits, np.float32)
        if np.isneginf(values).all():
            values[seed % values.size] = 3.0
        widest = {"top_p": min(1.0, top_p + EDGE_TOLERANCE), "min_p": min_p * (1 - EDGE_TOLERANCE)}
        support = fast_sampler(SamplingParams(temperature=temperature, top_k=top_k, **widest), values.size)
        sampler = fast_sampler(SamplingParams(10, temperature, top_k, top_p, min_p, seed), values.size)
        allowed = support._support(values)[0]  # probabilities() may round a weight of 1e-40 to 0
        tie = TIE_TOLERANCE * (np.abs(values[np.isfinite(values)]).max() + temperature)
        for position in range(5):
            assert values[sampler.choose(values, position)] >= values[allowed].min() - tie

    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    @pytest.mark.parametrize("token", [0, 777, 999])
    def test_find_the_only_finite_logit(self, params: dict[str, Any], token: int) -> None:
        logits = np.full(1000, -np.inf, np.float32)
        logits[token] = -3.0
        assert fast_sampler(SamplingParams(**params), 1000).choose(logits, 0) == token

    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    def test_reach_all_of_many_equal_logits(self, params: dict[str, Any]) -> None:
        logits = np.full(33, -1e4, np.float32)
        logits[[3, 19, 32]] = 12.5
        sampler = fast_sampler(SamplingParams(**{**params, "top_k": min(1, params.get("top_k", 0))}, seed=1), 33)
        assert {sampler.choose(logits, position) for position in range(100)} == {3, 19, 32}

    @pytest.mark.parametrize("shift", [0.0, 300.0, -300.0, 1e5])
    def test_do_not_depend_on_a_shift_of_the_logits(self, shift: float) -> None:
        logits = np.round(random_logits(3000) * 64) / 64  # exact after the shift
        sampler = fast_sampler(SamplingParams(temperature=0.5, top_p=0.9, seed=3), logits.size)
        shifted = (logits + np.float32(shift)).astype(np.float32)
        counts = draw_counts(sampler, shifted, 2000)
        assert chi_square_deviations(counts, probabilities_of(sampler, logits)) < CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize("temperature", [5e-324, 1e-9, 1e-3])
    def test_are_greedy_when_the_temperature_is_tiny(self, temperature: float) -> None:
        logits = random_logits(3000)
        assert fast_sampler(SamplingParams(temperature=temperature), 3000).choose(logits, 0) == logits.argmax()

    def test_are_even_when_the_temperature_is_huge(self) -> None:
        logits = random_logits(64)
        sampler = fast_sampler(SamplingParams(temperature=1e300, seed=2), 64)
        counts = draw_counts(sampler, logits, 6400)
        assert chi_square_deviations(counts, np.full(64, 1 / 64)) < CHI_SQUARE_DEVIATIONS

    def test_with_top_k_above_the_vocabulary_keep_it_all(self) -> None:
        logits = random_logits(300)
        everything = fast_sampler(SamplingParams(seed=4), 300)
        assert_same_draws(everything, fast_sampler(SamplingParams(top_k=1000, seed=4), 300), logits)

    @pytest.mark.parametrize("top_k", [1, 5, 100, 1500, 2999])
    def test_with_top_k_take_exactly_the_k_largest(self, top_k: int) -> None:
        logits = np.random.default_rng(1).permutation(np.arange(3000)).astype(np.float32)
        found = probabilities_of(fast_sampler(SamplingParams(temperature=1000.0, top_k=top_k), 3000), logits)
        assert np.array_equal(np.flatnonzero(found), np.flatnonzero(logits >= 3000 - top_k))

    def test_leave_the_logits_as_they_are(self) -> None:
        for params in SETTINGS:
            logits = random_logits(500)
            fast_sampler(SamplingParams(**params), 500).choose(logits, 0)
            assert np.array_equal(logits, random_logits(500))

    def test_of_a_large_vocabulary_follow_the_probabilities(self) -> None:
        logits = random_logits(151_936, 0.6)
        sampler = fast_sampler(SamplingParams(temperature=0.8, top_p=0.5, seed=9), logits.size)
        probabilities = probabilities_of(sampler, logits)
        bins = np.digitize(logits, np.quantile(logits, np.linspace(0, 1, 60)[1:-1]))
        counts = np.bincount(bins, draw_counts(sampler, logits, 1000))
        assert chi_square_deviations(counts, np.bincount(bins, probabilities)) < CHI_SQUARE_DEVIATIONS


def assert_same_draws(one: Any, other: Any, logits: np.ndarray) -> None:
    assert [one.choose(logits, position) for position in range(50)] == [
        other.choose(logits, position) for position in range(50)
    ]


class TestGreedy:
    def test_takes_the_largest_logit(self) -> None:
        logits = random_logits(5000)
        sampler = fast_sampler(SamplingParams(temperature=0, top_p=0.5, top_k=3), 5000)
        assert sampler.choose(logits, 0) == logits.argmax() and sampler.seed is None

    def test_takes_the_lowest_of_equal_tokens(self) -> None:
        assert fast_sampler(SamplingParams(temperature=0), 4).choose(np.array([1, 7, 7, 2], np.float32), 0) == 1


class TestSeeds:
    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    def test_the_same_seed_gives_the_same_tokens_in_any_order(self, params: dict[str, Any]) -> None:
        logits = [random_logits(900, seed=position) for position in range(40)]
        forward, backward = (fast_sampler(SamplingParams(**params, seed=8), 900) for _ in range(2))
        tokens = [forward.choose(logits[position], position) for position in range(40)]
        assert tokens == [backward.choose(logits[position], position) for position in reversed(range(40))][::-1]

    def test_other_seeds_and_positions_give_other_tokens(self) -> None:
        logits = random_logits(10_000, 0.1)
        tokens = {
            fast_sampler(SamplingParams(seed=seed), 10_000).choose(logits, p) for seed in range(5) for p in range(5)
        }
        assert len(tokens) > 20

    def test_without_a_seed_one_is_drawn_and_reported(self) -> None:
        logits = random_logits(1000)
        sampler = fast_sampler(SamplingParams(), 1000)
        assert isinstance(sampler, RandomSampler) and sampler.seed != fast_sampler(SamplingParams(), 1000).seed
        assert_same_draws(sampler, fast_sampler(SamplingParams(seed=sampler.seed), 1000), logits)

    def test_numbers_are_those_of_splitmix64(self) -> None:
        # First outputs of https://prng.di.unimi.it/splitmix64.c from the states 0 and 1234567.
        first, other = 0xE220A8397B1DCDAF, 6457827717110365317
        assert uniform(0, first, first) == (first >> 11) * 2.0**-53
        assert uniform(0, first, first ^ 1234567) == (other >> 11) * 2.0**-53
        assert uniform(1, 2, 3) == 0.814259011529328  # results of released versions must stay repeatable

    def test_numbers_are_uniform_along_every_argument(self) -> None:
        for arguments in (
            [(s, 0, 0) for s in range(8000)],
            [(0, p, 1) for p in range(8000)],
            [(7, 7, d) for d in range(8000)],
        ):
            numbers = np.array([uniform(*each) for each in arguments])
            counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
            assert chi_square_deviations(counts, np.full(50, 0.02)) < CHI_SQUARE_DEVIATIONS
            assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


class TestBadLogits:
    @pytest.mark.parametrize("params", [{"temperature": 0}, *SETTINGS], ids=str)
    @pytest.mark.parametrize(("value", "message"), [(math.nan, "hold NaN"), (math.inf, r"hold \+inf")])
    @pytest.mark.parametrize("token", [123, 999])
    def test_are_refused_by_name(self, params: dict[str, Any], value: float, message: str, token: int) -> None:
        logits = random_logits(1000)
        logits[token] = value
        sampler = fast_sampler(SamplingParams(**params), 1000)
        for call in (lambda: sampler.choose(logits, 0), lambda: probabilities_of(sampler, logits)):
            with pytest.raises(RequestError, match=message):
                call()

    @pytest.mark.parametrize("params", [{"temperature": 0}, *SETTINGS], ids=str)
    def test_without_any_token_are_refused(self, params: dict[str, Any]) -> None:
        sampler = fast_sampler(SamplingParams(**params), 1000)
        with pytest.raises(RequestError, match="all -inf"):
            sampler.choose(np.full(1000, -np.inf, np.float32), 0)
