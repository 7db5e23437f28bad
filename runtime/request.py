"""What a client asks of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmc.errors import UsageError
from llmc.runtime.results import Delta
from llmc.runtime.sampling import Processor, SamplingParams

# Ends an output: called with its new tokens and the text so far after every token; true means stop.
StoppingCriterion = Callable[[Sequence[int], str], bool]


@dataclass(frozen=True)
class Request:
    """A prompt and everything about how to answer it.

    Args:
        prompt: text, or token ids taken as they are.
        params: how tokens are chosen, and when to stop.
        logits_processors: called as ``f(tokens, logits)`` before every choice, in this order, from the engine's
            threads; they return float32 logits [vocab], edited in place or not.
        stopping_criteria: called as ``f(new_tokens, text)`` after every token.
        similarity: ``f(text, text)``, for ``params.consensus``, in place of the built-in ones.
        priority: lower is sooner. A step of one is worth ``scheduler.ARRIVALS_PER_PRIORITY`` arrivals, so nobody waits
            for ever.
        deadline_s: seconds from the submission after which the request fails; None waits.
        on_delta: called with every :class:`llmc.runtime.results.Delta` on the engine's thread; be quick.
        add_special_tokens: whether the tokenizer puts its own tokens, such as BOS, around a text prompt.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    logits_processors: tuple[Processor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    similarity: Callable[[str, str], float] | None = None
    priority: int = 0
    deadline_s: float | None = None
    on_delta: Callable[[Delta], None] | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("logits_processors", "stopping_criteria"):
            listed = getattr(self, name)
            object.__setattr__(self, name, tuple(listed))
            if not all(callable(item) for item in listed):
                raise UsageError(f"{name} holds {listed!r:.80}, expected functions")
        for name in ("similarity", "on_delta"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)!r:.80}, expected a function or None")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > 1000:
            raise UsageError(f"priority is {self.priority!r}, expected an integer from -1000 to 1000 (lower is sooner)")
        if self.deadline_s is not None and not (
            isinstance(self.deadline_s, int | float) and not isinstance(self.deadline_s, bool) and self.deadline_s > 0
        ):
            raise UsageError(f"deadline_s is {self.deadline_s!r}, expected seconds above 0, or None")
