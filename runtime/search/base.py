"""What a lockstep strategy is, and the arithmetic that strategies share."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError, ProcessorError, RequestError, UsageError, text_of

Floats = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
Processor = Callable[[Sequence[int], Floats], Floats]
# Whether these new tokens (without the prompt) are a finished output.
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
        score: what the strategy ranks by; its docstring says what that is.
        finish_reason: "stop" (an end-of-sequence token or a stopping criterion) or "length".
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


class Strategy(Protocol):
    """Chooses rows and tokens step by step; one object serves one request.

    Attributes:
        width: most rows that a step has.
        wants_hidden: whether hidden states are needed; without them ``hidden`` is None.
        prompt_chunk_outputs: whether ``start`` needs the hidden states of every position of the prompt.
    """

    width: int
    wants_hidden: bool
    prompt_chunk_outputs: bool

    def start(self, prompt: Sequence[int], logits: Floats, hidden: Floats | None) -> list[Branch]:
        """The first rows, from the logits after the prompt [V] and its hidden states [len(prompt), H]; parents are 0.

        A row with children that is not beyond the end of the new ones keeps one child in its place. So few rows of the
        cache are copied, and none that is still to be copied from is written over. This holds for ``step`` too.
        """

    def step(self, logits: Floats, hidden: Floats | None) -> list[Branch]:
        """The next rows, from the logits [rows, V] and hidden states [rows, H] of the last ones; none: finished."""

    def outputs(self) -> list[Hypothesis]:
        """What is finished by now, best first."""


class Ending:
    """When an output is finished.

    Args:
        max_tokens: new tokens at most, from 1.
        eos_token_ids: tokens that end an output.
        stops: asked about the new tokens of an output that goes on otherwise.

    Raises:
        UsageError: ``max_tokens`` is out of its range.
    """

    def __init__(self, max_tokens: int, eos_token_ids: Collection[int], stops: StopCriterion | None) -> None:
        require(max_tokens >= 1, "max_tokens", max_tokens, "an integer of at least 1")
        self.max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self.kinds = max(1, len(self._eos_token_ids))
        self._stops = stops

    def reason(self, tokens: Sequence[int]) -> FinishReason | None:
        """Why the new ``tokens`` are a finished output, or None.

        Raises:
            ProcessorError: the stopping criterion raised.
        """
        if tokens[-1] in self._eos_token_ids or self._stopped(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else None

    def _stopped(self, tokens: Sequence[int]) -> bool:
        stops = self._stops
        return stops is not None and guarded("the stopping criterion", lambda: bool(stops(tokens)))


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Refuse an argument.

    Raises:
        UsageError: ``holds`` is false.
    """
    if not holds:
        raise UsageError(f"{name} is {value!r}, expected {expected}")


Result = TypeVar("Result")


def guarded(what: str, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function that came with the request.

    Raises:
        ProcessorError: it raised.
    """
    try:
        return function(*arguments)
    except LlmcError:
        raise
    except BaseException as error:  # SystemExit too ends the request, not the engine
        raise ProcessorError(f"{what} raised {text_of(error)}; mend it, or leave it out") from error


def log_softmax(logits: Floats) -> Floats:
    """Logarithms of the probabilities of each row, a new array of the shape of ``logits`` [rows, V].

    Raises:
        RequestError: a row holds NaN or +inf, or nothing but -inf.
    """
    peaks = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(peaks).all():
        raise RequestError("the model's logits are not finite numbers; check the bundle with: llmc verify BUNDLE")
    shifted: Floats = logits - peaks
    totals = np.exp(shifted).sum(axis=-1, keepdims=True)
    shifted -= np.log(totals)
    return shifted


def processed(processors: Sequence[Processor], tokens: Sequence[int], scores: Floats) -> Floats:
    """The scores [V] of the sequence ``tokens`` after its processors, in order; they may change ``scores`` itself.

    Raises:
        ProcessorError: a processor raised, or returned something else than scores [V] without NaN and +inf.
    """
    frozen = tuple(tokens)  # not the strategy's list
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        lent = scores[:]  # whose shape, type and flags are the processor's own
        result = guarded(f"the logits processor {name}", processor, frozen, lent)
        if not isinstance(result, np.ndarray) or result.shape != scores.shape or result.dtype.kind not in "fiu":
            found = f"{result.dtype} of shape {result.shape}" if isinstance(result, np.ndarray) else repr(type(result))
            expected = f"real numbers of shape {scores.shape}"
            raise ProcessorError(f"the logits processor {name} returned {found}, expected {expected}")
        with np.errstate(over="ignore"):
            values = np.asarray(result, np.float32)
        if not values.max() < math.inf:
            raise ProcessorError(f"the logits processor {name} returned NaN or +inf, expected numbers or -inf")
        scores = values if values.flags.writeable else values.copy()
    return scores


def largest(values: Floats, k: int) -> NDArray[np.intp]:
    """Indices of the ``k`` largest of ``values`` [N], largest first, the lower index first among equals.

    What is -inf is left out, so there may be fewer than ``k``.
    """
    # The k-th largest of the maxima of many blocks is a bound that only few values reach; it costs one pass.
    blocks = max(1, values.size // 64)
    whole = values.size - values.size % blocks
    maxima = np.concatenate([values[:whole].reshape(-1, blocks).max(axis=0), values[whole:]])
    bound = np.partition(maxima, -k)[-k] if k <= maxima.size else -np.inf
    reach = values >= bound if bound > -np.inf else values > -np.inf
    candidates: NDArray[np.intp] = np.flatnonzero(reach)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]
