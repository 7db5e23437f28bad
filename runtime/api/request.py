"""Requests."""

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
# Ends an output: called with its new tokens and the text so far after every token; True stops.
StoppingCriterion = Callable[[Sequence[int], str], bool]


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it."""

    prompt: str | Sequence[int]  # text, or token ids, which are taken as they are
    params: SamplingParams = field(default_factory=SamplingParams)  # how tokens are chosen, and when to stop
    # functions ``f(tokens, logits)``, called in this order before every choice, on the engine's thread; ``tokens`` are
    # prompt and output so far, ``logits`` float32 [vocab], edited in place or returned
    logits_processors: tuple[Processor, ...] = ()
    # functions ``f(new_tokens, text)``, called after every token; true ends the output
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    priority: int = 0  # -1000 to 1000; lower is sooner
    deadline_s: float | None = None  # seconds from submission after which the request fails; None: no deadline
    # called with every :class:`llmc.runtime.api.results.Delta` on the engine's thread: be quick
    on_delta: Callable[[Delta], None] | None = None
    add_special_tokens: bool = True  # let the tokenizer put its own tokens, such as BOS, around a text prompt
    shown_tokens: tuple[int, ...] = ()  # special tokens that appear in the text; all others do not
    # a name of up to 256 characters; cached prefixes are shared only with requests of the same name
    prefix_scope: str | None = None
    adapter: str | None = None  # name of a loaded LoRA adapter; None: no adapter
    thinking: Thinking | None = None  # marks and budget of the reasoning before the answer; ``chat`` fills it in
    images: ImageRows | None = None  # embeddings of images or audio; ``chat`` makes them from messages

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
