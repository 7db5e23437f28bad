"""Rows of a search, the ways in which its outputs end, and its arithmetic."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError, ProcessorError, RequestError, text_of
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.processors import Processor

Floats = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
# True if these new tokens (without the prompt) are a finished output.
StopCriterion = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Branch:
    """One row of the next step: row ``parent`` of this step, continued with ``token``."""

    parent: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """A finished output.

    Attributes:
        token_ids: the new tokens, with the end-of-sequence token that ended them, if one did.
        score: see :class:`~llmc.runtime.search.beam.BeamSearch`.
        finish_reason: "stop" (an end-of-sequence token or a stopping criterion) or "length".
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


class Ending:
    """The ways in which an output ends; ``stops`` is asked about the new tokens of an output that goes on otherwise."""

    def __init__(self, max_tokens: int, eos_token_ids: Collection[int], stops: StopCriterion | None) -> None:
        self.max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self.kinds = max(1, len(self._eos_token_ids))
        self._stops = stops

    def reason(self, tokens: Sequence[int]) -> FinishReason | None:
        """The reason why the new ``tokens`` are a finished output, or None."""
        if tokens[-1] in self._eos_token_ids or self._stopped(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else None

    def _stopped(self, tokens: Sequence[int]) -> bool:
        stops = self._stops
        return stops is not None and guarded("the stopping criterion", lambda: bool(stops(tokens)))


Result = TypeVar("Result")


def guarded(what: str, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function that came with the request, whose errors become ProcessorError."""
    try:
        return function(*arguments)
    except LlmcError:
        raise
    except BaseException as error:  # SystemExit too ends the request, not the engine
        raise ProcessorError(f"{what} raised {text_of(error)}; mend it, or leave it out") from error


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of the rows of ``logits`` [rows, V], a new array; RequestError if they are not finite."""
    peaks = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(peaks).all():
        raise RequestError("the model's logits are not finite numbers; check the bundle with: llmc verify BUNDLE")
    shifted: Floats = logits - peaks
    totals = np.exp(shifted).sum(axis=-1, keepdims=True)
    shifted -= np.log(totals)
    return shifted


def processed(processors: Sequence[Processor], tokens: Sequence[int], scores: Logits) -> Logits:
    """The scores [V] of the sequence ``tokens`` after its processors, in order; they may change ``scores`` itself."""
    for processor in processors:
        scores = processor(tokens, scores)
    return scores
