"""Beam search, which knows nothing of caches and sessions."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.errors import NonFiniteError, ProcessorError, RequestError, text_of
from llmc.runtime.sampling.logits import most_probable
from llmc.runtime.sampling.processors import Processor

Floats = NDArray[np.float32]
EarlyStopping = bool | Literal["never"]
FinishReason = Literal["stop", "length"]
# True if these new tokens (without the prompt) are a finished output.
StopCriterion = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Continuation:
    """One row of the next step: row ``parent`` of this step, continued with ``token``."""

    parent: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """A finished output: its new tokens, with the one that ended it, and the score that :class:`BeamSearch` states."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """Keeps the ``num_beams`` most probable beginnings of an output; the choices of transformers 5.

    The score of an output is the sum of its tokens' log-probabilities, after the processors, divided by its length (in
    new tokens, the end-of-sequence token counts) to the power of ``length_penalty``.

    Args:
        num_beams: rows in all, from 1.
        num_return_sequences: outputs, up to ``num_beams``. There are fewer if the processors forbid the rest.
        length_penalty: above 0 favours long outputs, below 0 short ones.
        early_stopping: when ``num_beams`` outputs are finished, True stops at once; False stops unless the best beam,
            ended here, would be better than the worst of them; "never" stops when no beam can become better.
        max_tokens: new tokens at most, from 1.
        processors: applied to the log-probabilities of every beam, which are not normalised again.
        stops: a stopping criterion beside ``eos_token_ids``, asked about the new tokens.
    """

    def __init__(
        self,
        *,
        num_beams: int,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        max_tokens: int,
        eos_token_ids: Iterable[int] = (),
        processors: Sequence[Processor] = (),
        stops: StopCriterion | None = None,
    ) -> None:
        self.width = num_beams
        self._max_tokens, self._eos, self._stops = max_tokens, frozenset(eos_token_ids), stops
        self._processors = processors
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._beams = [_Beam((), 0.0, 0)]
        self._finished: list[Hypothesis] = []
        self._returned = num_return_sequences
        self._prompt: list[int] = []

    def start(self, prompt: Sequence[int], logits: Floats) -> list[Continuation]:
        """The first rows, from the logits after the prompt [V]; parents are 0.

        A row with children that is not beyond the end of the new ones keeps one child in its place. So few rows of the
        cache are copied, and none that is still to be copied from is written over. This holds for ``step`` too.

        Raises:
            NonFiniteError: the logits are not finite.
            RequestError: the processors forbid every token before any output ended.
            ProcessorError: a processor or the stopping criterion failed.
        """
        self._prompt = list(prompt)
        return self._advance(logits[None])

    def step(self, logits: Floats) -> list[Continuation]:
        """The next rows, from the logits [rows, V] of the last ones; none: finished. Raises what ``start`` raises."""
        return self._advance(logits)

    def outputs(self) -> list[Hypothesis]:
        """The best ``num_return_sequences`` outputs, best first."""
        return self._finished[: self._returned]

    def _advance(self, logits: Floats) -> list[Continuation]:
        scores = log_softmax(logits)
        for beam in self._beams if self._processors else ():
            tokens, row = [*self._prompt, *beam.tokens], scores[beam.row]
            for processor in self._processors:
                row = processor(tokens, row)
            scores[beam.row] = row
        self._grow(scores[[beam.row for beam in self._beams]])
        if not self._beams and not self._finished:
            raise RequestError("the logits processors forbid every token; allow at least one")
        return self._place(self._beams)

    def _grow(self, scores: Floats) -> None:
        """Continue the beams by one token, from the scores of their next tokens [beams, V].

        Only what is among the best ``width`` continuations may finish. The others are there so that ``width`` beams
        go on even if all of those end.
        """
        scores += np.array([beam.score for beam in self._beams], np.float32)[:, None]
        if scores.max() == -np.inf:  # the processors forbid all
            self._beams = []
            return
        best = most_probable(scores.reshape(-1), (1 + max(1, len(self._eos))) * self.width)
        going: list[_Beam] = []
        ended: list[Hypothesis] = []
        for number, (parent, token) in enumerate(zip(*np.unravel_index(best, scores.shape), strict=True)):
            beam = self._beams[parent]
            grown = _Beam((*beam.tokens, int(token)), float(scores[parent, token]), beam.row)
            reason = self._end_of(grown.tokens)
            if reason is None:
                going.append(grown)
            elif number < self.width:
                ended.append(Hypothesis(grown.tokens, self._normalise(grown.score, len(grown.tokens)), reason))
        self._finished = sorted([*self._finished, *ended], key=_by_score)[: self.width]
        going = going[: self.width]
        self._beams = going if self._may_improve(going) else []

    def _end_of(self, tokens: Sequence[int]) -> FinishReason | None:
        """The reason why the new ``tokens`` are a finished output, or None."""
        if tokens[-1] in self._eos or self._is_stopped(tokens):
            return "stop"
        return "length" if len(tokens) >= self._max_tokens else None

    def _is_stopped(self, tokens: Sequence[int]) -> bool:
        try:
            return self._stops is not None and bool(self._stops(tokens))
        except BaseException as error:  # SystemExit too ends the request, not the engine
            raise ProcessorError(f"the stopping criterion raised {text_of(error)}; mend it, or leave it out") from error

    def _may_improve(self, beams: list["_Beam"]) -> bool:
        """True if a beam could still end as one of the best ``width`` outputs, as far as ``early_stopping`` asks."""
        if not beams or len(self._finished) < self.width:
            return bool(beams)
        if self._early_stopping is True:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if longest else len(beams[0].tokens)
        return self._normalise(beams[0].score, length) > self._finished[-1].score

    def _normalise(self, score: float, length: int) -> float:
        return score / math.pow(length, self._length_penalty)

    @staticmethod
    def _place(beams: list["_Beam"]) -> list[Continuation]:
        """Give the first child of every row the place of its parent, and the others what is left."""
        heirs: dict[int, _Beam] = {}
        for beam in beams:
            if beam.row < len(beams):
                heirs.setdefault(beam.row, beam)
        kept = {id(beam) for beam in heirs.values()}
        others = iter([beam for beam in beams if id(beam) not in kept])
        continuations = []
        for row in range(len(beams)):
            beam = heirs.get(row) or next(others)
            continuations.append(Continuation(beam.row, beam.tokens[-1]))
            beam.row = row
        return continuations


@dataclass
class _Beam:
    """New tokens of an unfinished output, the sum of their scores (a float32), and the cache row they are in."""

    tokens: tuple[int, ...]
    score: float
    row: int


def _by_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of the rows of ``logits`` [rows, V], a new array; NonFiniteError if they are none."""
    peaks = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(peaks).all():
        raise NonFiniteError("the model's logits are not finite numbers; check the bundle with: llmc verify BUNDLE")
    shifted: Floats = logits - peaks
    totals = np.exp(shifted).sum(axis=-1, keepdims=True)
    shifted -= np.log(totals)
    return shifted
