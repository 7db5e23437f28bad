from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.sampling.penalties import NoRepeatNGram, OutputPenalty, RepetitionPenalty, TokenCounts

# One rounding of float32 for logits up to 16, where the reference works in float64.
LOGIT_TOLERANCE = 2e-6
VOCABULARY = 40

SEQUENCES = st.lists(st.integers(0, 6), min_size=1, max_size=60)


def random_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, VOCABULARY).astype(np.float32)


def of_transformers(name: str, value: Any, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    import torch
    from transformers.generation import logits_process

    processor = getattr(logits_process, name)(value)
    result: np.ndarray = processor(torch.tensor([list(tokens)]), torch.from_numpy(logits.copy())[None])[0].numpy()
    return result


def output_penalty_of_the_definition(
    tokens: Sequence[int], logits: np.ndarray, prompt_length: int, presence: float, frequency: float
) -> np.ndarray:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c the counts in the output."""
    expected = logits.astype(np.float64)
    for token in range(len(logits)):
        count = list(tokens[prompt_length:]).count(token)
        expected[token] -= count * frequency + (count > 0) * presence
    return expected


class TestRepetitionPenalty:
    @pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 7.0])
    @given(tokens=SEQUENCES)
    @settings(max_examples=30, deadline=None)
    def test_equals_transformers(self, penalty, tokens):
        expected = of_transformers("RepetitionPenaltyLogitsProcessor", penalty, tokens, random_logits())
        np.testing.assert_array_equal(RepetitionPenalty(penalty)(tokens, random_logits()), expected)

    def test_differs_from_transformers_with_another_penalty(self):
        expected = of_transformers("RepetitionPenaltyLogitsProcessor", 1.2, [1, 2], random_logits())
        assert not np.array_equal(RepetitionPenalty(1.21)([1, 2], random_logits()), expected)

    def test_leaves_forbidden_tokens_forbidden(self):
        logits = random_logits()
        logits[3] = -np.inf
        assert RepetitionPenalty(1.5)([3, 4], logits)[3] == -np.inf


class TestOutputPenalty:
    @given(tokens=SEQUENCES, prompt_length=st.integers(0, 60), presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
    @settings(max_examples=100, deadline=None)
    def test_follows_the_definition(self, tokens, prompt_length, presence, frequency):
        found = OutputPenalty(presence, frequency, prompt_length)(tokens, random_logits())
        expected = output_penalty_of_the_definition(tokens, random_logits(), prompt_length, presence, frequency)
        np.testing.assert_allclose(found, expected, rtol=LOGIT_TOLERANCE, atol=16 * LOGIT_TOLERANCE)

    @pytest.mark.parametrize("wrong", [(0.5, 0.201, 2), (0.501, 0.2, 2), (0.5, 0.2, 1)], ids=str)
    def test_with_other_arguments_fails_that_check(self, wrong):
        presence, frequency, prompt_length = wrong
        tokens = [3, 4, 4, 5]
        found = OutputPenalty(0.5, 0.2, 2)(tokens, random_logits())
        expected = output_penalty_of_the_definition(tokens, random_logits(), prompt_length, presence, frequency)
        assert np.abs(found - expected).max() > 16 * LOGIT_TOLERANCE


class TestNoRepeatNGram:
    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    @given(tokens=SEQUENCES)
    @settings(max_examples=40, deadline=None)
    def test_equals_transformers(self, size, tokens):
        expected = of_transformers("NoRepeatNGramLogitsProcessor", size, tokens, random_logits())
        np.testing.assert_array_equal(NoRepeatNGram(size)(tokens, random_logits()), expected)

    def test_of_another_size_forbids_others(self):
        tokens = [1, 2, 3, 1, 2]
        expected = of_transformers("NoRepeatNGramLogitsProcessor", 3, tokens, random_logits())
        assert expected[3] == -np.inf
        assert not np.array_equal(NoRepeatNGram(4)(tokens, random_logits()), expected)


MAKERS: list[Callable[[bool], Any]] = [
    lambda branching: RepetitionPenalty(1.3, branching),
    lambda branching: OutputPenalty(0.7, 0.3, 2, branching),
    lambda branching: NoRepeatNGram(2, branching),
]


class TestGrowth:
    @pytest.mark.parametrize("make", MAKERS)
    @given(tokens=SEQUENCES, cuts=st.lists(st.integers(1, 60), max_size=6))
    @settings(max_examples=40, deadline=None)
    def test_in_steps_of_any_size_changes_nothing(self, make, tokens, cuts):
        grown = make(False)
        for cut in sorted(cuts):
            grown(tokens[:cut], random_logits())
        np.testing.assert_array_equal(grown(tokens, random_logits()), make(False)(tokens, random_logits()))

    @pytest.mark.parametrize("make", MAKERS)
    @given(sequences=st.lists(SEQUENCES, min_size=2, max_size=6))
    @settings(max_examples=40, deadline=None)
    def test_of_several_sequences_in_turns_is_kept_apart(self, make, sequences):
        branching = make(True)
        for tokens in sequences:
            fresh = make(False)(tokens, random_logits())
            np.testing.assert_array_equal(branching(tokens, random_logits()), fresh)

    @pytest.mark.parametrize("make", MAKERS)
    def test_of_several_sequences_needs_branching(self, make):
        one, other = [1, 2, 5, 4, 9], [4, 3, 2, 1, 9, 1, 9, 4]
        trusting = make(False)
        trusting(one, random_logits())
        expected = make(False)(other, random_logits())
        assert not np.array_equal(trusting(other, random_logits()), expected)

    @pytest.mark.parametrize("make", MAKERS)
    def test_to_fewer_tokens_starts_over(self, make):
        shrunk = make(False)
        shrunk([1, 2, 3, 4, 2, 3, 9], random_logits())
        expected = make(False)([1, 2, 3], random_logits())
        np.testing.assert_array_equal(shrunk([1, 2, 3], random_logits()), expected)

    def test_to_many_different_tokens_counts_them_all(self):
        tokens = [*range(1000), *range(500)]
        counts = TokenCounts()
        for length in range(100, 1501, 100):
            counts.follow(tokens[:length])
        assert counts.tokens.tolist() == list(range(1000))
        assert counts.counts.tolist() == [2.0] * 500 + [1.0] * 500
