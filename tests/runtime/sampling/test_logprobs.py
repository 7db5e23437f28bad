import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.sampling.logprobs import TokenLogprobs, prompt_logprobs, token_logprobs
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler

# float32 exponentials of float32 differences, summed in float64, against float64 throughout.
LOGPROB_TOLERANCE = 2e-6
SIZE = 500

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 20, "min_p": 0.05},
    {"top_p": 0.7, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "temperature": 0.0},
]


def random_logits(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, size).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    values = values - values.max()
    result: np.ndarray = values - math.log(np.exp(values).sum())
    return result


def choose(logits: np.ndarray, tokens: list[int], **params: Any) -> TokenLogprobs:
    choice = make_sampler(SamplingContext(SamplingParams(**params), logits.size, prompt_length=2))(logits, tokens)
    assert choice.logprobs is not None and choice.logprobs.token == choice.token
    return choice.logprobs


def logprob_and_top(logits: np.ndarray, token: int, top: int) -> tuple[float, Any]:
    found = token_logprobs(logits, token, top)
    return found.logprob, found.top


class TestTokens:
    @given(
        logits=st.lists(
            st.one_of(st.floats(-200, 200, width=32), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=300
        ),
        top=st.integers(0, 20),
    )
    @settings(max_examples=200, deadline=None)
    def test_have_the_log_probabilities_of_a_softmax(self, logits, top):
        values = np.array([*logits, 0.0], np.float32)
        expected = log_softmax(values)
        found, most = logprob_and_top(values, len(logits), top)
        assert found == pytest.approx(expected[-1], abs=LOGPROB_TOLERANCE)
        ranked = sorted(np.flatnonzero(values > -np.inf).tolist(), key=lambda token: (-values[token], token))[:top]
        assert [token for token, _ in most] == ranked
        np.testing.assert_allclose([p for _, p in most], expected[ranked], atol=LOGPROB_TOLERANCE, rtol=1e-6)

    def test_of_slightly_other_logits_fail_that_check(self):
        other = random_logits() * np.float32(1.00001)
        difference = token_logprobs(other, 7, 0).logprob - log_softmax(random_logits())[7]
        assert abs(difference) > LOGPROB_TOLERANCE

    def test_of_a_large_vocabulary_are_as_exact(self):
        logits = random_logits(size=151_936)
        found, most = logprob_and_top(logits, 5, 20)
        expected = log_softmax(logits)
        assert found == pytest.approx(expected[5], abs=LOGPROB_TOLERANCE)
        assert [token for token, _ in most] == np.argsort(-logits, kind="stable")[:20].tolist()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_of_broken_logits_are_refused(self, value):
        logits = random_logits()
        logits[3] = value
        with pytest.raises(RequestError, match="the model's logits hold"):
            token_logprobs(logits, 0, 5)


class TestChoices:
    @pytest.mark.parametrize("params", SETTINGS, ids=str)
    def test_report_the_models_distribution_whatever_shapes_it(self, params):
        logits = random_logits(1)
        found, raw = choose(logits, [3, 4, 5, 4], **params, seed=3, logprobs=4), log_softmax(logits)
        assert found.logprob == pytest.approx(raw[found.token], abs=LOGPROB_TOLERANCE)
        assert [token for token, _ in found.top] == np.argsort(-raw)[:4].tolist()

    @pytest.mark.parametrize("params", [*SETTINGS, {"xtc_probability": 0.5}], ids=str)
    def test_are_the_same_tokens_as_without_log_probabilities(self, params):
        tokens: list[list[int]] = []
        for logprobs in (None, 5):
            sampler = make_sampler(
                SamplingContext(SamplingParams(**params, seed=6, logprobs=logprobs), SIZE, prompt_length=1)
            )
            chosen = [1]
            for position in range(40):
                chosen.append(sampler(random_logits(position), chosen).token)
            tokens.append(chosen)
        assert tokens[0] == tokens[1]

    def test_of_best_of_are_scored_without_being_asked(self):
        assert choose(random_logits(), [1], seed=1, best_of=3).top == ()

    def test_report_none_unless_asked(self):
        for params in ({}, {"temperature": 0.0}, {"repetition_penalty": 1.2}):
            sampler = make_sampler(SamplingContext(SamplingParams(**params), SIZE, prompt_length=0))
            assert sampler(random_logits(), [1]).logprobs is None


class TestPrompts:
    def test_are_scored_by_the_logits_before_each_token(self):
        logits = np.stack([random_logits(seed) for seed in range(4)])
        found = prompt_logprobs(logits, [9, 8, 7, 6], 2)
        for row, token, entry in zip(logits, [9, 8, 7, 6], found, strict=True):
            assert entry.token == token
            assert entry.logprob == pytest.approx(log_softmax(row)[token], abs=LOGPROB_TOLERANCE)
            assert [t for t, _ in entry.top] == np.argsort(-row)[:2].tolist()
