"""Requests as clients make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmc.errors import UsageError, format_value
from llmc.runtime.api.results import Delta
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import Processor
from llmc.runtime.tools.thinking import Thinking

LONGEST_DEADLINE = 10**9  # seconds
LONGEST_SCOPE = 256  # characters
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
        priority: lower is sooner. A step of one is worth ``scheduler.ARRIVALS_PER_PRIORITY`` arrivals, so nobody waits
            for ever.
        deadline_s: seconds from the submission after which the request fails; None waits.
        on_delta: called with every :class:`llmc.runtime.api.results.Delta` on the engine's thread; be quick.
        add_special_tokens: whether the tokenizer puts its own tokens, such as BOS, around a text prompt.
        shown_tokens: special tokens whose names are part of the text; others give none.
        draft_scope: a name; prompt lookup may find what comes next in ended answers to requests of the same name as
            well. None: in the request's own text alone. It means nothing to engines without ``draft="lookup"``.
        prefix_scope: a name; cached prefixes are shared with requests of the same name alone. None: with those that
            have none.
        thinking: the reasoning before the answer: forms count from the answer on, and a budget bounds it.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    logits_processors: tuple[Processor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    priority: int = 0
    deadline_s: float | None = None
    on_delta: Callable[[Delta], None] | None = None
    add_special_tokens: bool = True
    shown_tokens: tuple[int, ...] = ()
    draft_scope: str | None = None
    prefix_scope: str | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise UsageError(f"params is {format_value(self.params)}, expected SamplingParams")
        for name in ("logits_processors", "stopping_criteria"):
            listed = getattr(self, name)
            if not isinstance(listed, list | tuple):
                raise UsageError(f"{name} is {format_value(listed)}, expected a list of functions")
            object.__setattr__(self, name, tuple(listed))
            if not all(callable(item) for item in listed):
                raise UsageError(f"{name} holds {format_value(listed)}, expected functions")
        if self.on_delta is not None and not callable(self.on_delta):
            raise UsageError(f"on_delta is {format_value(self.on_delta)}, expected a function or None")
        if self.thinking is not None and not isinstance(self.thinking, Thinking):
            raise UsageError(f"thinking is {format_value(self.thinking)}, expected Thinking or None")
        _check_scope("draft_scope", self.draft_scope)
        _check_scope("prefix_scope", self.prefix_scope)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > 1000:
            raise UsageError(
                f"priority is {format_value(self.priority)}, expected an integer from -1000 to 1000 (lower is sooner)"
            )
        seconds = self.deadline_s
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds <= LONGEST_DEADLINE):
            raise UsageError(
                f"deadline_s is {format_value(seconds)}, expected seconds above 0, up to {LONGEST_DEADLINE}, or None"
            )


def _check_scope(name: str, scope: object) -> None:
    if scope is not None and not (isinstance(scope, str) and 0 < len(scope) <= LONGEST_SCOPE):
        raise UsageError(
            f"{name} is {format_value(scope)}, expected a name of up to {LONGEST_SCOPE} characters, or None"
        )
