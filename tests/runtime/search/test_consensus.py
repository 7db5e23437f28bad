"""Minimum Bayes risk chooses what the candidates agree on."""

import numpy as np
import pytest

from llmc.runtime.search.consensus import SIMILARITIES, compute_expected_similarities

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


def expected_gains(texts, similarity) -> np.ndarray:
    """argmax_h E_r[u(h, r)], Eikema and Aziz, with every text as a reference."""
    return np.array([[similarity(hypothesis, reference) for reference in texts] for hypothesis in texts]).mean(axis=1)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_scores_are_expected_similarities(name):
    similarity = SIMILARITIES[name]
    found = np.array(compute_expected_similarities(TEXTS, similarity))
    assert np.abs(found - expected_gains(TEXTS, similarity)).max() < TOLERANCE
    other = expected_gains(TEXTS, lambda a, b: similarity(a, b) + 1e-6)
    assert np.abs(found - other).max() > TOLERANCE
