"""The order of documents for each query, compared with the unquantized model's."""

import numpy as np
import pytest

from llmc.optimize.judge.retrieval import PASSAGES, compare_orders, read_passages, score_documents

RNG = np.random.default_rng(0)
WANTED = RNG.standard_normal((6, 12)).astype(np.float32)


def test_equal_orders_are_complete_whatever_the_scores():
    ranking = compare_orders(3 * WANTED - 1, WANTED)
    assert (ranking.queries, ranking.documents) == WANTED.shape
    assert ranking.top1_agreement == 1 and ranking.ndcg == pytest.approx(1)


def test_ndcg_is_the_textbooks():
    """Jarvelin and Kekalainen: gains over log2 of the rank plus one; here of 3 documents, whose gains are 3, 2, 1."""
    ranking = compare_orders(np.array([[2.0, 3.0, 1.0]]), np.array([[3.0, 2.0, 1.0]]))
    discounts = 1 / np.log2([2, 3, 4])
    assert ranking.ndcg == pytest.approx(([2, 3, 1] @ discounts) / ([3, 2, 1] @ discounts))
    assert ranking.top1_agreement == 0


def test_a_worse_model_ranks_worse():
    noisy = [compare_orders(WANTED + size * RNG.standard_normal(WANTED.shape), WANTED) for size in (0.02, 0.3, 2.0)]
    assert noisy[0].ndcg > noisy[1].ndcg > noisy[2].ndcg
    assert noisy[0].top1_agreement >= noisy[1].top1_agreement >= noisy[2].top1_agreement


def test_passages_differ_and_queries_are_no_part_of_their_documents():
    passages = read_passages()
    assert len(set(passages)) == len(passages) == PASSAGES
    assert all(query not in document for query, document in passages)


def test_vectors_are_scored_by_their_cosines():
    vectors = RNG.standard_normal((2 * PASSAGES, 8)).astype(np.float32)
    scaled = [vector * factor for vector, factor in zip(vectors, RNG.uniform(0.1, 9, len(vectors)), strict=True)]
    assert score_documents(scaled) == pytest.approx(score_documents(list(vectors)), abs=1e-6)
