"""Requests as clients make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmc.runtime.api.results import Delta
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import Processor
from llmc.runtime.sampling.ranges import Range, above, integer, optional
from llmc.runtime.tools.thinking import Thinking
from llmc.runtime.vision.rows import ImageRows

LONGEST_DEADLINE = 10**9  # seconds
LONGEST_SCOPE = 256  # characters
MOST_PRIORITY = 1000
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
        prefix_scope: a name; cached prefixes are shared with requests of the same name alone. None: with those that
            have none.
        adapter: the name of one that the model has loaded; None is the model without any.
        thinking: the reasoning before the answer: forms count from the answer on, and a budget bounds it.
        images: what stands in the places of image tokens of a prompt of token ids; ``Model.chat`` makes it of messages.
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
    prefix_scope: str | None = None
    adapter: str | None = None
    thinking: Thinking | None = None
    images: ImageRows | None = None

    def __post_init__(self) -> None:
        for name, values in _RANGES.items():
            values.check(name, getattr(self, name))
        for name in ("logits_processors", "stopping_criteria"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


_FUNCTIONS = Range(
    "functions", "a list of functions", lambda value: isinstance(value, list | tuple) and all(map(callable, value))
)
_NAME = optional(
    Range(
        "text",
        f"a name of up to {LONGEST_SCOPE} characters",
        lambda value: isinstance(value, str) and 0 < len(value) <= LONGEST_SCOPE,
    )
)
_RANGES = {
    "params": Range("parameters", "SamplingParams", lambda value: isinstance(value, SamplingParams)),
    "logits_processors": _FUNCTIONS,
    "stopping_criteria": _FUNCTIONS,
    "priority": integer(-MOST_PRIORITY, MOST_PRIORITY, note="lower is sooner"),
    "deadline_s": optional(above(0, LONGEST_DEADLINE)),
    "on_delta": optional(Range("function", "a function", callable)),
    "prefix_scope": _NAME,
    "adapter": _NAME,
    "thinking": optional(Range("thinking", "Thinking", lambda value: isinstance(value, Thinking))),
    "images": optional(Range("images", "ImageRows", lambda value: isinstance(value, ImageRows))),
}
