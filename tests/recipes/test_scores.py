"""Scores of logits against reference logits, position by position."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

WINDOWS, LENGTH, VOCABULARY = 6, 9, 32
# float64 formulas against float64 formulas: rounding only.
CLOSE = 1e-12


@pytest.fixture
def scores(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("scores")


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def tokens(generator: np.random.Generator) -> np.ndarray:
    return generator.integers(0, VOCABULARY, (WINDOWS, LENGTH))


@pytest.fixture
def reference(generator: np.random.Generator) -> np.ndarray:
    return generator.normal(size=(WINDOWS, LENGTH, VOCABULARY)).astype(np.float32)


def divergences(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """KL by the book: sum p log(p / q) of explicit probabilities, at every position."""
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, candidate))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def test_equal_logits_have_no_divergence_and_agree_everywhere(scores, reference, tokens):
    found = scores.score(reference, reference, tokens)
    assert (found.quality.mean_kl, found.quality.p99_kl, found.quality.top1_agreement) == (0, 0, 1)


def test_divergence_is_that_of_the_definition_on_all_but_the_last_position(scores, reference, tokens, generator):
    candidate = reference + generator.normal(size=reference.shape).astype(np.float32)
    expected = divergences(reference, candidate)[:, :-1]
    found = scores.score(reference, candidate, tokens)
    np.testing.assert_allclose(found.kl, expected, rtol=0, atol=CLOSE)
    assert found.quality.mean_kl == pytest.approx(expected.mean(), abs=CLOSE)
    assert found.quality.p99_kl == pytest.approx(np.percentile(expected, 99), abs=CLOSE)


def test_the_comparison_notices_a_divergence_in_the_other_direction(scores, reference, tokens, generator):
    candidate = reference + generator.normal(size=reference.shape).astype(np.float32)
    found = scores.score(candidate, reference, tokens)
    assert np.abs(found.kl - divergences(reference, candidate)[:, :-1]).max() > 1e9 * CLOSE


def test_what_follows_the_last_token_is_not_scored(scores, reference, tokens):
    candidate = reference.copy()
    candidate[:, -1] = -candidate[:, -1]
    assert scores.score(reference, candidate, tokens).quality.mean_kl == 0


def test_perplexity_is_of_the_next_token(scores, reference, tokens):
    certain = np.full(reference.shape, -100, np.float32)
    for row, following in zip(certain, tokens, strict=True):
        row[np.arange(LENGTH - 1), following[1:]] = 0
    assert scores.score(reference, certain, tokens).quality.perplexity == pytest.approx(1, abs=CLOSE)
    uniform = np.zeros(reference.shape, np.float32)
    assert scores.score(reference, uniform, tokens).quality.perplexity == pytest.approx(VOCABULARY, abs=1e3 * CLOSE)


def test_agreement_counts_the_positions_with_the_same_first_choice(scores, reference, tokens):
    candidate = reference.copy()
    worst = candidate[0, :2].argmin(axis=1)
    candidate[0, [0, 1], worst] = 100
    found = scores.score(reference, candidate, tokens)
    assert found.quality.top1_agreement == pytest.approx(1 - 2 / (WINDOWS * (LENGTH - 1)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(scores, reference, tokens, wrong):
    candidate = reference.copy()
    candidate[1, 2, 3] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        scores.score(reference, candidate, tokens)


def test_a_missing_window_is_refused(scores, reference, tokens):
    with pytest.raises(ValueError, match="shorter"):
        scores.score(reference, reference[:-1], tokens)


def test_logits_of_another_vocabulary_or_length_are_refused(scores, reference, tokens):
    with pytest.raises(ValueError, match="shape"):
        scores.score(reference, reference[:, :, :-1], tokens)
    with pytest.raises(ValueError, match="shape"):
        scores.score(reference, reference[:, :2], tokens)


def test_ratio_is_that_of_the_means_and_certain_where_one_is_a_multiple(scores):
    theirs = np.abs(np.random.default_rng(1).normal(size=(WINDOWS, LENGTH)))
    assert scores.ratio(of(scores, theirs / 4), of(scores, theirs)) == (
        pytest.approx(0.25),
        pytest.approx(0, abs=CLOSE),
    )


def test_ratio_error_is_about_the_spread_over_repetitions(scores):
    """Over many draws of 24 windows the reported error must be the spread of the ratio, within the noise of both."""
    generator, found = np.random.default_rng(2), []
    for _ in range(400):
        common = generator.gamma(4, size=(24, 1))
        ours, theirs = (common * generator.gamma(4, size=(24, 1)) for _ in range(2))
        found.append(scores.ratio(of(scores, ours), of(scores, theirs)))
    ratios, errors = np.array(found).T
    # 400 draws know the spread to 1 / sqrt(2 x 400) = 4 %, and at 24 windows the formula is some per cent low.
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.2)
    # Unpaired errors would be larger by far more than that: the pairing is what makes small differences visible.
    unpaired = np.sqrt(2 / 24) * np.sqrt((1 + 1 / 4) ** 2 - 1)
    assert unpaired > 1.2 * np.std(ratios)


def test_ratio_to_nothing_is_not_a_number(scores):
    ours, theirs = of(scores, np.ones((2, 2))), of(scores, np.zeros((2, 2)))
    assert np.isnan(scores.ratio(ours, theirs)).all()


def of(scores: ModuleType, kl: np.ndarray) -> object:
    """A score that consists of its divergences only."""
    return scores.Score(None, kl)
