"""Minimum Bayes risk: of several outputs, the one that the others agree with most."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHRF_ORDER = 6
CHRF_BETA = 2


@dataclass(frozen=True)
class Similarity:
    """A similarity of two texts: ``parts`` takes each text apart once, and ``compare`` compares the parts."""

    parts: Callable[[str], Any]
    compare: Callable[[Any, Any], float]

    def __call__(self, hypothesis: str, reference: str) -> float:
        return self.compare(self.parts(hypothesis), self.parts(reference))


def compute_expected_similarities(texts: Sequence[str], similarity: Similarity) -> list[float]:
    """The expected similarity of each text to what the model might say, for which the texts themselves stand.

    Kumar and Byrne, Minimum Bayes-Risk Decoding for Statistical Machine Translation, https://aclanthology.org/N04-1022;
    Eikema and Aziz, https://arxiv.org/abs/2108.04718
    """
    shares = {text: count / len(texts) for text, count in Counter(texts).items()}
    parts = {text: similarity.parts(text) for text in shares}
    gains = {
        text: sum(share * similarity.compare(parts[text], parts[other]) for other, share in shares.items())
        for text in shares
    }
    return [gains[text] for text in texts]


def _f1(ours: Counter[str], theirs: Counter[str]) -> float:
    """Harmonic mean of precision and recall of words, without regard to their order.

    Words are parted by white space. Two empty texts are alike. Rajpurkar et al., SQuAD, section 6.1, without its
    normalisation of text, https://arxiv.org/abs/1606.05250
    """
    total = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / total if total else 1.0


def _chrf(ours: Sequence[Counter[str]], theirs: Sequence[Counter[str]]) -> float:
    """F-score of character n-grams, n = 1 ... 6, in which recall weighs twice as much as precision (chrF2).

    White space is ignored; orders that one of the texts is too short for are left out of the means. Two texts without
    any sign are alike (sacrebleu, which counts to 100 and agrees otherwise, says 0). Popovic, chrF: character n-gram
    F-score for automatic MT evaluation, https://aclanthology.org/W15-3049
    """
    orders = min(len(ours), len(theirs))
    if not orders:
        return float(len(ours) == len(theirs))
    precision = recall = 0.0
    for mine, other in zip(ours, theirs, strict=False):
        matches = (mine & other).total()
        precision += matches / mine.total() / orders
        recall += matches / other.total() / orders
    weight = CHRF_BETA**2
    total = weight * precision + recall
    return (1 + weight) * precision * recall / total if total else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(text.split())


def _ngrams(text: str) -> list[Counter[str]]:
    signs = "".join(text.split())
    orders = range(1, min(len(signs), CHRF_ORDER) + 1)
    return [Counter(signs[i : i + n] for i in range(len(signs) - n + 1)) for n in orders]


token_f1 = Similarity(_words, _f1)
chrf = Similarity(_ngrams, _chrf)
SIMILARITIES: dict[str, Similarity] = {"f1": token_f1, "chrf": chrf}
