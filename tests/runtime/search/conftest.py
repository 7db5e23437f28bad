"""A small made-up model, and a driver that runs a strategy on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.search.beam import BeamSearch, Hypothesis

Floats = NDArray[np.float32]


def run(strategy: BeamSearch, prompt: Sequence[int], model: Any) -> list[Hypothesis]:
    """The strategy's outputs on a model with rows."""
    branches = strategy.start(prompt, model.start([prompt])[0])
    while branches:
        logits = model.step([branch.parent for branch in branches], [branch.token for branch in branches])
        branches = strategy.step(logits)
    return strategy.outputs()


@dataclass
class MadeUpModel:
    """Logits that are a function of all tokens so far and look random."""

    vocab_size: int
    seed: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Logits after ``tokens`` [V]."""
        return np.random.default_rng([self.seed, *tokens]).normal(size=self.vocab_size) * 2

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats:
        self.rows = [tuple(prompt) for prompt in prompts]
        return self._logits()

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        self.rows = [(*self.rows[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return self._logits()

    def _logits(self) -> Floats:
        return np.array([self.logits(row) for row in self.rows], np.float32)


@pytest.fixture(scope="session")
def decode() -> Callable[[BeamSearch, Sequence[int], MadeUpModel], list[Hypothesis]]:
    """Runs one strategy."""
    return run


@pytest.fixture(scope="session")
def made_up() -> type[MadeUpModel]:
    return MadeUpModel
