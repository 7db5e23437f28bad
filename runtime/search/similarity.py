"""Similarities of two texts, from 0 to 1."""

from collections import Counter
from collections.abc import Callable

CHRF_ORDER = 6
CHRF_BETA = 2


def token_f1(hypothesis: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, without regard to their order.

    Words are parted by white space. Two empty texts are alike. Rajpurkar et al., SQuAD, section 6.1, without its
    normalisation of text, https://arxiv.org/abs/1606.05250
    """
    ours, theirs = (Counter(text.split()) for text in (hypothesis, reference))
    total = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / total if total else 1.0


def chrf(hypothesis: str, reference: str) -> float:
    """F-score of character n-grams, n = 1 ... 6, in which recall weighs twice as much as precision (chrF2).

    White space is ignored; orders that one of the texts is too short for are left out of the means. Two texts without
    any sign are alike (sacrebleu, which counts to 100 and agrees otherwise, says 0). Popovic, chrF: character n-gram
    F-score for automatic MT evaluation, https://aclanthology.org/W15-3049
    """
    ours, theirs = ("".join(text.split()) for text in (hypothesis, reference))
    orders = min(len(ours), len(theirs), CHRF_ORDER)
    if not orders:
        return float(ours == theirs)
    precision = recall = 0.0
    for n in range(1, orders + 1):
        matches = (_ngrams(ours, n) & _ngrams(theirs, n)).total()
        precision += matches / (len(ours) - n + 1) / orders
        recall += matches / (len(theirs) - n + 1) / orders
    weight = CHRF_BETA**2
    total = weight * precision + recall
    return (1 + weight) * precision * recall / total if total else 0.0


def _ngrams(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


SIMILARITIES: dict[str, Callable[[str, str], float]] = {"f1": token_f1, "chrf": chrf}
