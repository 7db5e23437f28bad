"""Beam search on the rows of a bundle's cache: the small model in float32 chooses what transformers chooses."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from llmc import bundle
from llmc.optimize.build import build
from llmc.runtime.search.beam import BeamSearch
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.onnxruntime.cpu import OnnxRuntimeSession

NEW_TOKENS = 16
BEAMS = 4
# Sums of 16 float32 log-probabilities of two implementations of a float32 model.
SCORE_TOLERANCE = 2e-4


class BundleRows:
    """One request on the rows of a session; rows are copied one after another, in place."""

    def __init__(self, session: OnnxRuntimeSession) -> None:
        self._session = session
        self._length = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        ids = np.array(prompts, np.int64)
        self._length = ids.shape[1]
        last = np.array([[self._length - 1]])
        return self._session.run(Batch(Phase.PREFILL, ids, np.array([0]), last))[:, -1]

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        for row, parent in enumerate(parents):
            self._session.cache.copy(parent, row, 0, self._length)
        ids, past = np.array(tokens, np.int64)[:, None], np.full(len(tokens), self._length)
        self._length += 1
        return self._session.run(Batch(Phase.DECODE, ids, past, np.zeros_like(ids)))[:, -1]


@pytest.fixture(scope="module")
def session(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxRuntimeSession]:
    folder = build(tiny_export, tmp_path_factory.mktemp("beams") / "fp32", precision="fp32", max_batch=BEAMS).output
    opened = OnnxRuntimeSession(folder, bundle.read_bundle(folder), threads=1)
    opened.cache.reserve(BEAMS, 64)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def wanted(prompts, common_tokens, transformers_beams):
    """Tokens and scores of the outputs of every prompt, each run alone."""
    options = {"num_beams": BEAMS, "num_return_sequences": BEAMS}
    return [transformers_beams([prompt], NEW_TOKENS, common_tokens, **options)[0] for prompt in prompts]


def equal(outputs, wanted) -> bool:
    tokens, scores = zip(*wanted, strict=True)
    if tuple(output.token_ids for output in outputs) != tokens:
        return False
    sums = [(o.score - score) * len(o.token_ids) for o, score in zip(outputs, scores, strict=True)]
    return bool(np.abs(sums).max() < SCORE_TOLERANCE)


def beams(eos: list[int]) -> BeamSearch:
    return BeamSearch(num_beams=BEAMS, num_return_sequences=BEAMS, max_tokens=NEW_TOKENS, eos_token_ids=eos)


def test_beams_on_cache_rows_equal_those_of_transformers(session, prompts, common_tokens, wanted, decode):
    for prompt, expected in zip(prompts, wanted, strict=True):
        assert equal(decode(beams(common_tokens), prompt, BundleRows(session)), expected)


def test_rows_that_are_not_copied_are_noticed(session, prompts, common_tokens, wanted, decode):
    class Lazy(BundleRows):
        def step(self, parents, tokens):
            return super().step(range(len(tokens)), tokens)

    for prompt, expected in zip(prompts, wanted, strict=True):
        assert not equal(decode(beams(common_tokens), prompt, Lazy(session)), expected)
