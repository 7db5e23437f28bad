"""Beam search, and diverse beam search, which runs it in groups that keep off each other's tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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

EarlyStopping = bool | Literal["never"]


class BeamSearch(Strategy):
    """Keeps the ``num_beams`` most probable beginnings of an output; the choices of transformers 5.

    The score of an output is the sum of its tokens' log-probabilities, after the processors, divided by its length (in
    new tokens, the end-of-sequence token counts) to the power of ``length_penalty``. In groups, Vijayakumar et al.,
    Diverse Beam Search, https://arxiv.org/abs/1610.02424, with their Hamming diversity: a token loses
    ``diversity_penalty`` for every time that the groups before chose it in the same step; as in their program, the
    loss stays in the score.

    Args:
        num_beams: rows in all, from 1.
        num_return_sequences: outputs, from 1 to ``num_beams``. There are fewer if the processors forbid the rest.
        length_penalty: above 0 favours long outputs, below 0 short ones; from -20 to 20.
        early_stopping: when ``num_beams`` outputs are finished, True stops at once; False stops unless the best
            beam, ended here, would be better than the worst of them; "never" stops when no beam can become better.
        num_beam_groups: a divisor of ``num_beams``; 1 is plain beam search.
        diversity_penalty: in units of log-probability, from 0 to 1e30.
        shared: of every :class:`~llmc.runtime.search.base.Strategy`; the processors are applied to the
            log-probabilities of every beam, not normalised again.
    """

    def __init__(
        self,
        *,
        num_beams: int,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        num_beam_groups: int = 1,
        diversity_penalty: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(num_beams, **shared)
        self.group_width = num_beams // num_beam_groups
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self._groups = [_Group() for _ in range(num_beam_groups)]
        self._returned = num_return_sequences
        self._penalty = np.float32(diversity_penalty)
        self._prompt: list[int] = []

    def start(self, prompt: Sequence[int], logits: Floats, hidden: Floats | None = None) -> list[Branch]:
        """Branch from the prompt; see :class:`~llmc.runtime.search.base.Strategy`.

        Raises:
            RequestError: the logits are not finite, or the processors forbid every token before any output ended.
            ProcessorError: a processor or the stopping criterion failed.
        """
        self._prompt = list(prompt)
        return self._advance(logits[None])

    def step(self, logits: Floats, hidden: Floats | None = None) -> list[Branch]:
        """Go on by one token; raises what ``start`` raises."""
        return self._advance(logits)

    def outputs(self) -> list[Hypothesis]:
        """The best ``num_return_sequences`` of all groups' outputs, best first."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished]
        return sorted(finished, key=_by_score)[: self._returned]

    def _advance(self, logits: Floats) -> list[Branch]:
        scores = log_softmax(logits)
        for row, tokens in self._sequences().items():
            scores[row] = processed(self.processors, tokens, scores[row])
        chosen: list[int] = []
        for group in self._groups:
            rows = scores[[beam.row for beam in group.beams]]
            for token in chosen:
                rows[:, token] -= self._penalty
            chosen += group.advance(self, rows)
        beams = [beam for group in self._groups for beam in group.beams]
        if not beams and not self.outputs():
            raise RequestError("the logits processors forbid every token; allow at least one")
        return self._place(beams)

    def _sequences(self) -> dict[int, list[int]]:
        """Prompt and new tokens of every row, if a processor wants to see them."""
        beams = [beam for group in self._groups for beam in group.beams] if self.processors else []
        return {beam.row: [*self._prompt, *beam.tokens] for beam in beams}

    def normalised(self, score: float, length: int) -> float:
        """The score of an output of ``length`` new tokens."""
        return score / math.pow(length, self.length_penalty)

    @staticmethod
    def _place(beams: list["_Beam"]) -> list[Branch]:
        """Give the first child of every row the place of its parent, and the others what is left."""
        heirs: dict[int, _Beam] = {}
        for beam in beams:
            if beam.row < len(beams):
                heirs.setdefault(beam.row, beam)
        kept = {id(beam) for beam in heirs.values()}
        others = iter([beam for beam in beams if id(beam) not in kept])
        branches = []
        for row in range(len(beams)):
            beam = heirs.get(row) or next(others)
            branches.append(Branch(beam.row, beam.tokens[-1]))
            beam.row = row
        return branches


@dataclass
class _Beam:
    """New tokens of an unfinished output, the sum of their scores (a float32), and the cache row they are in."""

    tokens: tuple[int, ...]
    score: float
    row: int


@dataclass
class _Group:
    """Unfinished ``beams``, at most ``group_width`` of the search, and as many ``finished`` outputs."""

    beams: list[_Beam] = field(default_factory=lambda: [_Beam((), 0.0, 0)])
    finished: list[Hypothesis] = field(default_factory=list)

    def advance(self, search: BeamSearch, scores: Floats) -> list[int]:
        """Continue the beams by one token, from the scores of their next tokens [beams, V]; returns the tokens chosen.

        Only what is among the best ``width`` continuations may finish. The others are there so that ``width`` beams
        go on even if all of those end.
        """
        if not self.beams:
            return []
        width = search.group_width
        scores += np.array([beam.score for beam in self.beams], np.float32)[:, None]
        if scores.max() == -np.inf:  # the processors forbid all
            self.beams = []
            return []
        best = most_probable(scores.reshape(-1), (1 + search.ending.kinds) * width)
        going: list[_Beam] = []
        ended: list[Hypothesis] = []
        for rank, (parent, token) in enumerate(zip(*np.unravel_index(best, scores.shape), strict=True)):
            beam = self.beams[parent]
            grown = _Beam((*beam.tokens, int(token)), float(scores[parent, token]), beam.row)
            reason = search.ending.reason(grown.tokens)
            if reason is None:
                going.append(grown)
            elif rank < width:
                ended.append(Hypothesis(grown.tokens, search.normalised(grown.score, len(grown.tokens)), reason))
        self.finished = sorted([*self.finished, *ended], key=_by_score)[:width]
        going = going[:width]
        self.beams = going if self._may_improve(search, going) else []
        return [*(beam.tokens[-1] for beam in self.beams), *(hypothesis.token_ids[-1] for hypothesis in ended)]

    def _may_improve(self, search: BeamSearch, beams: list[_Beam]) -> bool:
        if not beams or len(self.finished) < search.group_width:
            return bool(beams)
        if search.early_stopping is True:
            return False
        longest = search.early_stopping == "never" and search.length_penalty > 0
        length = search.ending.max_tokens if longest else len(beams[0].tokens)
        return search.normalised(beams[0].score, length) > self.finished[-1].score


def _by_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score
