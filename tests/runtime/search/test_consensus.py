"""Minimum Bayes risk chooses what the candidates agree on."""

import numpy as np
import pytest

from llmc.errors import ProcessorError, UsageError
from llmc.runtime.search import SIMILARITIES, choose, token_f1

TEXTS = [
    "the train leaves at nine",
    "bananas are yellow",
    "the train leaves at ten past nine",
    "a train leaves at nine",
    "the train leaves at nine",
    "no",
]
# Float64 means of a handful of numbers, added up in another order.
TOLERANCE = 1e-12


def expected_gains(candidates, similarity, weights) -> np.ndarray:
    """argmax_h E_r[u(h, r)], Eikema and Aziz, with every candidate as a reference."""
    gains = np.array([[similarity(hypothesis, reference) for reference in candidates] for hypothesis in candidates])
    return gains @ (np.array(weights) / np.sum(weights))


@pytest.mark.parametrize("name", SIMILARITIES)
@pytest.mark.parametrize("weights", [None, [1, 5, 1, 1, 1, 0], [0.1, 0.2, 0.7, 0.0, 0.0, 0.0]], ids=str)
def test_scores_are_expected_similarities_and_the_best_wins(name, weights):
    similarity = SIMILARITIES[name]
    wanted = expected_gains(TEXTS, similarity, weights or [1] * len(TEXTS))
    found = choose(TEXTS, similarity, weights)
    assert np.abs(np.array(found.scores) - wanted).max() < TOLERANCE
    assert wanted[found.index] > wanted.max() - TOLERANCE
    other = expected_gains(TEXTS, lambda a, b: similarity(a, b) + 1e-6, weights or [1] * len(TEXTS))
    assert np.abs(np.array(found.scores) - other).max() > TOLERANCE


def test_the_text_that_others_resemble_is_chosen_and_the_outlier_is_not():
    assert choose(TEXTS, token_f1).index == 0


def test_the_hypothesis_comes_first():
    """A similarity that only counts the hypothesis decides alone."""
    assert choose(["aa", "b", "cccc"], lambda hypothesis, reference: float(len(hypothesis))).index == 2


def test_weights_can_turn_the_choice():
    assert choose(TEXTS, token_f1, [0, 1, 0, 0, 0, 0]).index == 1


def test_the_first_of_equals_wins():
    assert choose(["x", "y", "y", "x"], token_f1).index == 0


def test_tokens_may_be_compared_instead_of_texts():
    assert choose([(1, 2, 3), (1, 2), (7,), (1, 2, 4)], token_f1).index == 1


def test_one_candidate_is_chosen():
    assert choose(["only"], token_f1).index == 0


def test_equal_candidates_are_compared_once():
    calls = []

    def counted(first: str, second: str) -> float:
        calls.append((first, second))
        return token_f1(first, second)

    choose(["a", "b", "a", "a"], counted)
    assert len(calls) == len(set(calls)) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "much", [1.0]], ids=str)
def test_a_similarity_that_is_no_number_is_an_error_of_the_request(value):
    with pytest.raises(ProcessorError, match=r"similarity returned .* expected a finite number"):
        choose(["a", "b"], lambda first, second: value)


def test_a_similarity_that_raises_is_an_error_of_the_request():
    with pytest.raises(ProcessorError, match="similarity raised KeyError"):
        choose(["a", "b"], lambda first, second: {}[first])


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")]], ids=str)
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(UsageError, match=r"weights is .* expected 2 finite numbers"):
        choose(["a", "b"], token_f1, weights)


def test_no_candidates_are_refused():
    with pytest.raises(UsageError, match="at least one"):
        choose([], token_f1)
