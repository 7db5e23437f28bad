"""Samplers draw from the distribution that transformers' processors leave, repeatably."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import pick, uniform
from llmc.runtime.sampling.logits import most_probable
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import CUTS, PROCESSORS, Candidates, SamplingContext, build
from llmc.runtime.sampling.samplers import Sampler, make_sampler

SIZE = 400
# A chi-square statistic more than 5 standard deviations above its mean: 3e-7 for a sampler that is right.
CHI_SQUARE_DEVIATIONS = 5.0
# float32 throughout in transformers, for logits up to 20.
SCORE_TOLERANCE = 1e-5

EVERYTHING: dict[str, Any] = {
    "logit_bias": ((3, 1.5),),
    "allowed_tokens": tuple(range(300)),
    "min_tokens": 5,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "dry_multiplier": 0.8,
    "no_repeat_ngram_size": 3,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.95,
    "top_n_sigma": 2.0,
    "xtc_probability": 0.5,
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": 0.6, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 90, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.6},
]
PENALIZED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.8},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7, "top_p": 0.9},
    {"dry_multiplier": 1.2, "dry_allowed_length": 1, "top_n_sigma": 1.5},
    {"allowed_tokens": tuple(range(0, SIZE, 3)), "logit_bias": ((6, 4.0),), "top_k": 30},
]
WARPERS = {
    "logit_bias": "SequenceBiasLogitsProcessor",
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor",
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
}


class Anything:
    finished = False

    def mask(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def accept(self, token: int) -> None:
        pass


def random_logits(size: int = SIZE, deviation: float = 2.5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, size).astype(np.float32)


def sampler_of(size: int = SIZE, **params: Any) -> Sampler:
    return make_sampler(SamplingContext(SamplingParams(**params), size, prompt_length=0))


def run(tokens: list[int], logits: np.ndarray, **params: Any) -> np.ndarray:
    """The logits that are drawn from, step by step."""
    context = SamplingContext(SamplingParams(**params), logits.size, 0, (2,))
    current = logits.copy()
    for step in build(PROCESSORS, context).values():
        current = step(tokens, current)
    found = Candidates(np.arange(logits.size), current)
    for cut in build(CUTS, context).values():
        found = cut(found, len(tokens))
    result = np.full_like(logits, -np.inf)
    result[found.tokens] = found.logits
    return result


def chain_of_transformers(tokens: list[int], logits: np.ndarray, **params: Any) -> np.ndarray:
    """The same by transformers, in the order given."""
    import torch
    from transformers.generation import logits_process

    scores = torch.from_numpy(logits.copy())[None]
    for name, value in params.items():
        given = {(token,): bias for token, bias in value} if name == "logit_bias" else value
        scores = getattr(logits_process, WARPERS[name])(given)(torch.tensor([tokens]), scores)
    result: np.ndarray = scores[0].numpy()
    return result


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    result: np.ndarray = weights / weights.sum()
    return result


def chi_square_deviations(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations between the chi-square statistic and its mean; rare tokens are pooled."""
    expected = probabilities.astype(np.float64) * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = (observed > 0) | (expected > 0)
    freedom = max(1, np.count_nonzero(possible) - 1)
    with np.errstate(divide="ignore"):  # a token that cannot be drawn and was makes it infinite
        statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draw_counts(sampler: Sampler, logits: np.ndarray, tokens: list[int], draws: int) -> np.ndarray:
    counts = np.zeros(logits.size, np.int64)
    for seed in range(draws):
        sampler.seed = seed  # the tokens so far are to stay
        counts[sampler(logits, tokens).token] += 1
    return counts


class TestSteps:
    def test_run_in_the_documented_order_if_they_are_asked_for(self):
        own = [lambda tokens, logits: logits]
        context = SamplingContext(SamplingParams(**EVERYTHING), SIZE, 0, (2,), own, Anything())
        assert [*build(PROCESSORS, context)] == [*PROCESSORS] and [*build(CUTS, context), "mirostat"] == [*CUTS]
        instead = SamplingContext(SamplingParams(temperature=0.8, mirostat=2), SIZE, 0)
        assert [*build(CUTS, instead)] == ["temperature", "mirostat"]
        nothing = SamplingContext(SamplingParams(), SIZE, 0, (2,))
        assert not build(PROCESSORS, nothing) and not build(CUTS, nothing)

    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    @pytest.mark.parametrize("size", [50, 4099])
    def test_leave_what_transformers_leaves(self, params, size):
        logits = random_logits(size)
        expected = chain_of_transformers([1], logits, **params)
        np.testing.assert_allclose(run([1], logits, **params), expected, atol=SCORE_TOLERANCE)

    def test_all_together_leave_what_transformers_leaves(self):
        tokens, logits = [5, 6, 7, 8, 5, 6], random_logits()
        params = {"logit_bias": ((5, 9.0),), "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "temperature": 0.7}
        params |= {"top_k": 60, "top_p": 0.9, "min_p": 0.02}
        found = run(tokens, logits, **params)
        np.testing.assert_allclose(found, chain_of_transformers(tokens, logits, **params), atol=SCORE_TOLERANCE)
        bias = params.pop("logit_bias")
        other = chain_of_transformers(tokens, logits, **params, logit_bias=bias)
        assert not np.allclose(found, other, atol=SCORE_TOLERANCE)

    @pytest.mark.parametrize("other", [{"temperature": 0.81}, {"top_p": 0.91}], ids=str)
    def test_of_another_parameter_fail_that_check(self, other):
        params = {"temperature": 0.8, "top_p": 0.9}
        expected = chain_of_transformers([1], random_logits(1000), **{**params, **other})
        assert not np.allclose(run([1], random_logits(1000), **params), expected, atol=SCORE_TOLERANCE)

    @pytest.mark.parametrize("temperature", [5e-324, 1e-9])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
    def test_of_a_tiny_temperature_are_greedy(self, temperature, scale):
        logits = random_logits(3000) * np.float32(scale)
        token = sampler_of(3000, temperature=temperature, top_p=0.9)(logits, []).token
        assert token == logits.argmax()

    def test_of_a_huge_temperature_leave_all_even(self):
        np.testing.assert_allclose(softmax(run([], random_logits(64), temperature=1e300)), 1 / 64, atol=SCORE_TOLERANCE)


class TestDraws:
    @pytest.mark.parametrize("params", [*SETTINGS, *PENALIZED], ids=str)
    def test_follow_the_distribution_that_the_steps_leave(self, params):
        assert self.deviations(params, params) < CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize(
        ("params", "wrong"),
        [
            ({"repetition_penalty": 1.4}, {"repetition_penalty": 2.0}),
            ({"temperature": 0.8}, {"temperature": 1.0}),
            ({"top_p": 0.9}, {"top_p": 0.8}),
        ],
        ids=str,
    )
    def test_of_other_parameters_fail_that_check(self, params, wrong):
        assert self.deviations(params, wrong) > CHI_SQUARE_DEVIATIONS

    def deviations(self, params: dict[str, Any], expected: dict[str, Any]) -> float:
        logits = random_logits()
        likely = np.argsort(-logits)[:8].tolist()
        history = [*likely[:4], *likely[:3], likely[6]]  # some repeat, so that penalties matter
        counts = draw_counts(sampler_of(**params), logits, history, 2000)
        return chi_square_deviations(counts, softmax(run(history, logits, **expected)))

    def test_with_xtc_drop_the_likely_tokens_as_often_as_asked(self):
        logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
        params = SamplingParams(seed=2, xtc_probability=0.3, xtc_threshold=0.15)
        kept, dropped = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.0, 0.0, 2 / 3, 1 / 3])
        for protected, right in (((), 0.7 * kept + 0.3 * dropped), ((0,), kept)):
            sampler = make_sampler(SamplingContext(params, 4, prompt_length=0, eos_token_ids=protected))
            counts = np.bincount([sampler(logits, [0] * position).token for position in range(3000)], minlength=4)
            assert chi_square_deviations(counts, right) < CHI_SQUARE_DEVIATIONS
            assert chi_square_deviations(counts, 0.55 * kept + 0.45 * dropped) > CHI_SQUARE_DEVIATIONS

    def test_do_not_depend_on_a_shift_of_the_logits(self):
        logits = np.round(random_logits(3000) * 64) / 64  # exact after the shift
        sampler = sampler_of(3000, temperature=0.5, top_p=0.9, seed=3)
        for shift in (-300.0, 1e5):
            assert sampler(logits + np.float32(shift), [1]) == sampler(logits, [1])

    def test_leave_the_logits_as_they_are(self):
        for params in (*SETTINGS, *PENALIZED):
            logits = random_logits()
            sampler_of(**params)(logits, [1, 2])
            assert np.array_equal(logits, random_logits())


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0]), max_size=900),
    point=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
@settings(max_examples=100, deadline=None)
def test_a_draw_finds_the_weight_that_a_point_falls_into(weights, point):
    values = np.array([*weights, 1.0, 0.0], np.float32)
    ends = values.astype(np.float64).cumsum()
    index = pick(values, point)
    assert values[index] > 0
    slack = 1e-12 * ends[-1]
    assert ends[index] - values[index] - slack <= point * ends[-1] <= ends[index] + slack


class TestGreedy:
    def test_takes_the_lowest_of_the_largest_logits_whatever_the_cuts_say(self):
        for params in ({"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"top_p": 0.1}, {"top_k": 3}):
            sampler = sampler_of(4, temperature=0, **params)
            assert sampler(np.array([1, 7, 7, 2], np.float32), []).token == 1 and sampler.seed is None


class TestSeeds:
    @pytest.mark.parametrize("params", [*SETTINGS, *PENALIZED], ids=str)
    def test_repeat_the_tokens_also_when_the_sampler_is_made_anew_in_the_middle(self, params):
        whole, tokens = sampler_of(**params, seed=5), [1, 2]
        for position in range(30):
            token = whole(random_logits(seed=position % 5), tokens).token
            assert sampler_of(**params, seed=5)(random_logits(seed=position % 5), tokens).token == token
            tokens.append(token)

    def test_that_differ_give_other_tokens(self):
        logits = random_logits(10_000, 0.1)
        tokens = {sampler_of(10_000, seed=seed)(logits, [0] * p).token for seed in range(5) for p in range(5)}
        assert len(tokens) > 20

    def test_are_drawn_and_reported_if_none_is_given(self):
        logits, sampler = random_logits(), sampler_of()
        assert sampler.seed is not None and sampler.seed != sampler_of().seed
        again = sampler_of(seed=sampler.seed)
        assert all(sampler(logits, [0] * p) == again(logits, [0] * p) for p in range(20))

    def test_give_numbers_of_splitmix64(self):
        # First outputs of https://prng.di.unimi.it/splitmix64.c from the states 0 and 1234567.
        first, other = 0xE220A8397B1DCDAF, 6457827717110365317
        assert uniform(0, first, first) == (first >> 11) * 2.0**-53
        assert uniform(0, first, first ^ 1234567) == (other >> 11) * 2.0**-53
        assert uniform(1, 2, 3) == 0.814259011529328  # results of released versions must stay repeatable

    def test_give_uniform_numbers_along_every_argument(self):
        for arguments in ([(i, 0, 0) for i in range(8000)], [(0, i, 1) for i in range(8000)]):
            numbers = np.array([uniform(*each) for each in arguments])
            counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
            assert chi_square_deviations(counts, np.full(50, 0.02)) < CHI_SQUARE_DEVIATIONS
            assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


@pytest.mark.parametrize("params", [{"temperature": 0}, *SETTINGS], ids=str)
@pytest.mark.parametrize(("value", "message"), [(math.nan, "hold NaN"), (math.inf, r"hold \+inf"), (-math.inf, "all")])
def test_bad_logits_are_refused_by_name(params, value, message):
    logits = np.full(SIZE, -np.inf, np.float32)
    logits[123] = value
    with pytest.raises(RequestError, match=message):
        sampler_of(**params)(logits, [])


@pytest.mark.parametrize("size", [1, 63, 64, 129, 4096])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_the_most_probable_are_those_of_a_stable_sort(size, k):
    values = np.random.default_rng(size).integers(0, 50, size).astype(np.float32)  # with many equals
    assert most_probable(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()
    values[1:] = -np.inf
    assert most_probable(values, k).tolist() == [0]


def test_a_function_that_keeps_the_logits_it_saw_sees_nobody_elses():
    kept: list[np.ndarray] = []

    def keep(tokens: Sequence[int], seen: np.ndarray) -> np.ndarray:
        kept.append(seen)
        return seen

    params = SamplingParams(seed=1, top_k=50, repetition_penalty=1.2)
    curious = make_sampler(SamplingContext(params, SIZE, prompt_length=0, processors=[keep]))
    first = curious(random_logits(), [1, 2])
    before = kept[0].copy()
    curious(random_logits(seed=1), [1, 2])
    assert np.array_equal(kept[0], before)
    kept[0][:] = np.nan
    assert curious(random_logits(), [1, 2]) == first
