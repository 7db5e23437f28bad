"""The built-in similarities say what their papers and sacrebleu say."""

import pytest

from llmc.runtime.search.consensus import SIMILARITIES, chrf, token_f1

# Float64 sums of up to six terms; the recorded values have all digits.
TOLERANCE = 1e-12
# Of sacrebleu 2.6.0: CHRF().sentence_score(hypothesis, [reference]).score / 100
RECORDED = [
    ("the cat sat on the mat", "the cat sat on the mat", 1.0),
    ("the cat sat on the mat", "a cat is on the mat", 0.5381922884524024),
    ("a cat is on the mat", "the cat sat on the mat", 0.470405208035783),
    ("hello", "goodbye", 0.060606060606060594),
    ("ab", "abcdefgh", 0.23404255319148937),
    ("abcdefgh", "ab", 0.55),
    ("a", "a", 1.0),
    ("Die Katze, die auf der Matte saß.", "Die Katze saß auf einer Matte!", 0.5433590542021837),
    ("北京欢迎你", "欢迎来到北京", 0.22127659574468084),
    ("aaaaaaa", "aaa", 0.7023643949930458),
    ("one two three", "onetwothree", 1.0),
    ("", "something", 0.0),
]


@pytest.mark.parametrize(("hypothesis", "reference", "value"), RECORDED)
def test_chrf_equals_sacrebleu(hypothesis, reference, value):
    assert abs(chrf(hypothesis, reference) - value) < TOLERANCE


def transcribed_chrf(hypothesis: str, reference: str, order: int, beta: float) -> float:
    """(1 + beta^2) CHRP CHRR / (beta^2 CHRP + CHRR), Popovic 2015; orders without n-grams are left out."""
    texts = [[sign for sign in text if not sign.isspace()] for text in (hypothesis, reference)]
    precisions, recalls = [], []
    for n in range(1, order + 1):
        ours, theirs = ([tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts)
        if ours and theirs:
            matches = sum(min(ours.count(gram), theirs.count(gram)) for gram in set(ours))
            precisions.append(matches / len(ours))
            recalls.append(matches / len(theirs))
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return (1 + beta**2) * precision * recall / (beta**2 * precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize(("order", "beta"), [(5, 2), (6, 1), (6, 3)])
def test_another_order_or_weight_is_noticed(order, beta):
    pairs = [pair[:2] for pair in RECORDED if pair[0]]
    assert max(abs(chrf(*pair) - transcribed_chrf(*pair, order, beta)) for pair in pairs) > 1e-3


@pytest.mark.parametrize(
    ("hypothesis", "reference", "value"),
    [
        ("a b c", "c b a", 1.0),
        ("a b c d", "a b", 2 * (2 / 4) * (2 / 2) / (2 / 4 + 2 / 2)),
        ("a a a", "a", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("a", "b", 0.0),
        ("", "b", 0.0),
        ("  a\n b ", "a b", 1.0),
        ("a b b", "b b c", 2 / 3),
    ],
)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(hypothesis, reference, value):
    assert abs(token_f1(hypothesis, reference) - value) < TOLERANCE


@pytest.mark.parametrize("name", SIMILARITIES)
def test_empty_texts_are_alike(name):
    assert SIMILARITIES[name]("", " \n") == 1.0
