"""Decoding over several cache rows at once, in lockstep: beam search, diverse beam search, contrastive search.

A :class:`Strategy` is told the logits of every row and answers which rows go on with which tokens; it knows nothing of
caches and sessions. :mod:`~llmc.runtime.search.consensus` compares outputs that are finished.
"""

from llmc.runtime.search.base import Branch, Hypothesis, Strategy
from llmc.runtime.search.beam import BeamSearch
from llmc.runtime.search.consensus import expected_similarities
from llmc.runtime.search.contrastive import Contrastive
from llmc.runtime.search.similarity import SIMILARITIES, chrf, token_f1

__all__ = [
    "SIMILARITIES",
    "BeamSearch",
    "Branch",
    "Contrastive",
    "Hypothesis",
    "Strategy",
    "chrf",
    "expected_similarities",
    "token_f1",
]
