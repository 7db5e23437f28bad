"""Contrastive search: the most probable tokens compete, and what resembles the context loses."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.errors import RequestError
from llmc.runtime.sampling.masses import most_probable
from llmc.runtime.search.base import (
    Branch,
    Floats,
    Hypothesis,
    Strategy,
    log_softmax,
    processed,
)


class Contrastive(Strategy):
    """Takes, of the ``top_k`` most probable tokens, the best by probability and novelty.

    A candidate v scores (1 - alpha) p(v | x) - alpha max_j cos(h_v, h_j): its probability against the likeness of its
    hidden state to that of any token before. Su et al., A Contrastive Framework for Neural Text Generation,
    https://arxiv.org/abs/2202.06417. Every step feeds all candidates, one per row, so that a token costs what
    ``top_k`` rows cost, and the last token is fed too. The score of the output is the sum of its log-probabilities.

    Args:
        top_k: candidates, from 1; 1 is greedy.
        penalty_alpha: weight of the likeness, from 0 (greedy) to 1.
        shared: of every :class:`~llmc.runtime.search.base.Strategy`; the processors are applied to the logits, and the
            probabilities are those after them.
    """

    prompt_chunk_outputs = True

    def __init__(self, *, top_k: int, penalty_alpha: float, **shared: Any) -> None:
        super().__init__(top_k, **shared)
        self._alpha = penalty_alpha
        self._tokens: list[int] = []
        self._prompt_length = 0
        self._directions = np.zeros((0, 0), np.float32)
        self._candidates: list[int] = []
        self._logarithms = np.zeros(0, np.float32)
        self._score = 0.0
        self._finished: list[Hypothesis] = []

    def start(self, prompt: Sequence[int], logits: Floats, hidden: Floats | None) -> list[Branch]:
        """Name the first candidates; see :class:`~llmc.runtime.search.base.Strategy`.

        Raises:
            RequestError: the logits are not finite, or the processors forbid every token.
            ProcessorError: a processor or the stopping criterion failed.
        """
        assert hidden is not None and len(hidden) == len(prompt)
        self._tokens = list(prompt)
        self._prompt_length = len(prompt)
        self._directions = np.zeros((len(prompt) + self.ending.max_tokens, hidden.shape[1]), np.float32)
        self._directions[: len(prompt)] = _directions(hidden)
        return self._propose(logits, 0)

    def step(self, logits: Floats, hidden: Floats | None) -> list[Branch]:
        """Choose among the candidates that were fed, and name the next; raises what ``start`` raises."""
        assert hidden is not None and len(hidden) == len(self._candidates)
        directions = _directions(hidden)
        likeness = (self._directions[: len(self._tokens)] @ directions.T).max(axis=0)  # (k,)
        chosen = int(np.argmax((1 - self._alpha) * np.exp(self._logarithms) - self._alpha * likeness))
        self._directions[len(self._tokens)] = directions[chosen]
        self._tokens.append(self._candidates[chosen])
        self._score += float(self._logarithms[chosen])
        new = tuple(self._tokens[self._prompt_length :])
        reason = self.ending.reason(new)
        if reason is not None:
            self._finished = [Hypothesis(new, self._score, reason)]
            return []
        return self._propose(logits[chosen], chosen)

    def outputs(self) -> list[Hypothesis]:
        """The one output, once it is finished."""
        return self._finished

    def _propose(self, logits: Floats, parent: int) -> list[Branch]:
        if self.processors:
            logits = processed(self.processors, self._tokens, logits.copy())
            if logits.max() == -np.inf:
                raise RequestError("the logits processors forbid every token; allow at least one")
        logarithms = log_softmax(logits[None])[0]
        tokens = most_probable(logarithms, self.width)
        self._candidates = [int(token) for token in tokens]
        self._logarithms = logarithms[tokens]
        return [Branch(parent, token) for token in self._candidates]


def _directions(hidden: Floats) -> Floats:
    """Hidden states [n, H] at length 1; those at length 0 stay so, and resemble nothing."""
    lengths = np.sqrt(np.square(hidden, dtype=np.float32).sum(axis=-1, keepdims=True))
    directions: Floats = hidden / np.maximum(lengths, np.finfo(np.float32).tiny)
    return directions
