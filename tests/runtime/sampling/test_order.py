import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmc.runtime.sampling.params import STEPS, SamplingParams
from llmc.runtime.sampling.processors import BUILDERS, SamplingContext, build_steps
from llmc.runtime.sampling.samplers import RandomSampler, SupportSampler, make_sampler

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


class Anything:
    finished = False

    def mask(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def accept(self, token: int) -> None:
        pass


def unchanged(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    return logits


def random_logits(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 2.5, size).astype(np.float32)


def names(**params: Any) -> list[str]:
    context = SamplingContext(SamplingParams(**params), SIZE, 0, (2,), [unchanged], Anything())
    return [name for name, _ in build_steps(context)]


def run(tokens: list[int], logits: np.ndarray, **params: Any) -> np.ndarray:
    """The logits that are drawn from, step by step."""
    current = logits.copy()
    for _, step in build_steps(SamplingContext(SamplingParams(**params), logits.size, 0, (2,))):
        current = step(tokens, current)
    return current


def chain_of_transformers(tokens: list[int], logits: np.ndarray, order: Sequence[tuple[str, Any]]) -> np.ndarray:
    import torch
    from transformers.generation import logits_process

    scores = torch.from_numpy(logits.copy())[None]
    for name, value in order:
        scores = getattr(logits_process, name)(value)(torch.tensor([tokens]), scores)
    result: np.ndarray = scores[0].numpy()
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


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    result: np.ndarray = weights / weights.sum()
    return result


class TestOrder:
    def test_is_the_same_list_for_parameters_and_builders(self) -> None:
        assert set(BUILDERS) == set(STEPS)

    def test_is_the_documented_one(self) -> None:
        assert names(**EVERYTHING) == list(STEPS)

    def test_has_nothing_that_is_not_asked_for(self) -> None:
        context = SamplingContext(SamplingParams(), SIZE, 0, (2,))
        assert build_steps(context) == []

    def test_equals_a_chain_of_transformers(self) -> None:
        tokens, logits = [5, 6, 7, 8, 5, 6], random_logits()
        params = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "logit_bias": ((5, 9.0),), "temperature": 0.7}
        params |= {"top_k": 60, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9}
        order: list[tuple[str, Any]] = [
            ("SequenceBiasLogitsProcessor", {(5,): 9.0}),
            ("RepetitionPenaltyLogitsProcessor", 1.3),
            ("NoRepeatNGramLogitsProcessor", 3),
            ("TemperatureLogitsWarper", 0.7),
            ("TopKLogitsWarper", 60),
            ("TopPLogitsWarper", 0.9),
            ("MinPLogitsWarper", 0.02),
            ("TypicalLogitsWarper", 0.9),
        ]
        expected = chain_of_transformers(tokens, logits, order)
        np.testing.assert_allclose(run(tokens, logits, **params), expected, atol=SCORE_TOLERANCE)
        other = chain_of_transformers(tokens, logits, [*order[1:], order[0]])  # the bias last
        assert not np.allclose(run(tokens, logits, **params), other, atol=SCORE_TOLERANCE)


class TestChooser:
    @pytest.mark.parametrize(
        ("params", "kind"),
        [
            ({"top_p": 0.9, "temperature": 0.7, "repetition_penalty": 1.2}, RandomSampler),
            ({"typical_p": 0.9}, SupportSampler),
        ],
        ids=str,
    )
    def test_is_the_fast_one_wherever_it_can_be(self, params: dict[str, Any], kind: type) -> None:
        assert isinstance(make_sampler(SamplingContext(SamplingParams(**params), SIZE, prompt_length=0))._sampler, kind)  # type: ignore

    def test_of_a_greedy_request_ignores_what_shapes_the_distribution(self) -> None:
        logits = random_logits()
        for params in ({"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"typical_p": 0.1}, {"top_k": 1}):
            sampler = make_sampler(SamplingContext(SamplingParams(temperature=0, **params), SIZE, prompt_length=0))
            assert sampler(logits, [1]).token == logits.argmax() and sampler.seed is None


DRAWN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.8},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7, "top_p": 0.9},
    {"frequency_penalty": 1.0, "top_k": 30, "min_p": 0.01},
    {"dry_multiplier": 1.2, "dry_allowed_length": 1, "temperature": 1.2},
    {"typical_p": 0.8, "temperature": 0.9},
    {"top_n_sigma": 1.5},
    {"logit_bias": ((5, 4.0), (6, -2.0)), "banned_tokens": (11, 12)},
    {"allowed_tokens": tuple(range(0, SIZE, 3)), "top_p": 0.95},
]


class TestDraws:
    @pytest.mark.parametrize("params", DRAWN, ids=lambda params: "-".join(params))
    def test_follow_the_distribution_that_the_steps_leave(self, params: dict[str, Any]) -> None:
        assert self.deviations(params, params) < CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize(
        ("params", "wrong"),
        [
            ({"repetition_penalty": 1.4}, {"repetition_penalty": 2.0}),
            ({"presence_penalty": 1.5}, {"presence_penalty": 0.8}),
            ({"typical_p": 0.8}, {"typical_p": 0.9}),
        ],
        ids=str,
    )
    def test_of_other_parameters_fail_that_check(self, params: dict[str, Any], wrong: dict[str, Any]) -> None:
        assert self.deviations(params, wrong) > CHI_SQUARE_DEVIATIONS

    def deviations(self, params: dict[str, Any], expected: dict[str, Any]) -> float:
        history, logits = self.history(), random_logits(3)
        counts = np.zeros(SIZE, np.int64)
        sampler: Any = make_sampler(SamplingContext(SamplingParams(**params, seed=0), SIZE, prompt_length=0))
        for seed in range(1500):
            sampler._sampler.seed = seed  # draws differ by seed or position, and the tokens so far are to stay
            counts[sampler(logits, history).token] += 1
        return chi_square_deviations(counts, softmax(run(history, logits, **expected)))

    @pytest.mark.parametrize("ratio", [0.0, 0.02], ids=["right", "wrong"])
    def test_from_many_tokens_follow_the_distribution(self, ratio: float) -> None:
        logits = random_logits(4, 30_000) / 4
        sampler: Any = make_sampler(
            SamplingContext(SamplingParams(top_n_sigma=4.5, seed=0), logits.size, prompt_length=0)
        )
        tokens = [sampler(logits, [0] * position).token for position in range(1500)]
        expected = softmax(run([], logits, top_n_sigma=4.5, min_p=ratio))
        bins = np.digitize(logits, np.quantile(logits, np.linspace(0, 1, 40)[1:-1]))
        counts = np.bincount(bins[tokens], minlength=40)
        assert np.count_nonzero(run([], logits, top_n_sigma=4.5) > -np.inf) > 10_000
        deviations = chi_square_deviations(counts, np.bincount(bins, expected, minlength=40))
        assert (deviations < CHI_SQUARE_DEVIATIONS) == (ratio == 0)

    @staticmethod
    def history() -> list[int]:
        """Some of the most probable tokens, with repetitions, so that penalties matter."""
        likely = np.argsort(-random_logits(3))[:8].tolist()
        return [*likely[:4], *likely[:3], likely[6]]

    def test_with_xtc_drop_the_likely_tokens_as_often_as_asked(self) -> None:
        logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
        params = SamplingParams(seed=2, xtc_probability=0.3, xtc_threshold=0.15)
        sampler = make_sampler(SamplingContext(params, 4, prompt_length=0))
        counts = np.bincount([sampler(logits, [0] * position).token for position in range(3000)], minlength=4)
        kept = np.array([0.4, 0.3, 0.2, 0.1])
        dropped = np.array([0.0, 0.0, 2 / 3, 1 / 3])
        assert chi_square_deviations(counts, 0.7 * kept + 0.3 * dropped) < CHI_SQUARE_DEVIATIONS
        assert chi_square_deviations(counts, 0.55 * kept + 0.45 * dropped) > CHI_SQUARE_DEVIATIONS
        protecting = make_sampler(SamplingContext(params, 4, prompt_length=0, eos_token_ids=(0,)))
        drawn = [protecting(logits, [0] * position).token for position in range(3000)]
        assert chi_square_deviations(np.bincount(drawn, minlength=4), kept) < CHI_SQUARE_DEVIATIONS

    @pytest.mark.parametrize("params", DRAWN, ids=str)
    def test_are_repeated_by_the_seed(self, params: dict[str, Any]) -> None:
        outputs = []
        for _ in range(2):
            sampler = make_sampler(SamplingContext(SamplingParams(**params, seed=5), SIZE, prompt_length=2))
            tokens = [1, 2]
            for position in range(30):
                tokens.append(sampler(random_logits(position), tokens).token)
            outputs.append(tokens)
        assert outputs[0] == outputs[1]

    def test_do_not_change_when_the_sampler_is_made_anew_in_the_middle(self) -> None:
        params = SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.4, dry_multiplier=1.0, top_p=0.9)
        whole = make_sampler(SamplingContext(params, SIZE, prompt_length=2))
        tokens = [1, 2]
        for position in range(40):
            again = make_sampler(SamplingContext(params, SIZE, prompt_length=2))
            token = whole(random_logits(position % 5), tokens).token
            assert again(random_logits(position % 5), tokens).token == token
            tokens.append(token)
