"""Minimum Bayes risk: of several outputs, the one that the others agree with most."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from llmc.errors import ProcessorError
from llmc.runtime.search.base import guarded

CHRF_ORDER = 6
CHRF_BETA = 2


def expected_similarities(texts: Sequence[str], similarity: Callable[[str, str], float]) -> list[float]:
    """The expected similarity of each text to what the model might say, for which the texts themselves stand.

    Kumar and Byrne, Minimum Bayes-Risk Decoding for Statistical Machine Translation, https://aclanthology.org/N04-1022;
    Eikema and Aziz, https://arxiv.org/abs/2108.04718

    Args:
        texts: samples of the model, at least one.
        similarity: called with (hypothesis, reference), once for each pair of different texts, a text with itself
            included; the higher, the more alike. Built in: :data:`SIMILARITIES`.

    Raises:
        ProcessorError: the similarity raised, or returned something else than a finite number.
    """
    masses = {text: count / len(texts) for text, count in Counter(texts).items()}
    gains = {
        hypothesis: sum(mass * _checked(similarity, hypothesis, reference) for reference, mass in masses.items())
        for hypothesis in masses
    }
    return [gains[text] for text in texts]


def _checked(similarity: Callable[[str, str], float], first: str, second: str) -> float:
    value = guarded("the similarity", similarity, first, second)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ProcessorError(f"the similarity returned {value!r}, expected a finite number")
    return number


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
