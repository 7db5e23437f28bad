"""Minimum Bayes risk: of several outputs, the one that the others agree with most."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from llmc.errors import ProcessorError
from llmc.runtime.search.base import guarded


def expected_similarities(texts: Sequence[str], similarity: Callable[[str, str], float]) -> list[float]:
    """The expected similarity of each text to what the model might say, for which the texts themselves stand.

    Kumar and Byrne, Minimum Bayes-Risk Decoding for Statistical Machine Translation, https://aclanthology.org/N04-1022;
    Eikema and Aziz, https://arxiv.org/abs/2108.04718

    Args:
        texts: samples of the model, at least one.
        similarity: called with (hypothesis, reference), once for each pair of different texts, a text with itself
            included; the higher, the more alike. Built in: :data:`~llmc.runtime.search.similarity.SIMILARITIES`.

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
