"""A request inside the engine, and its branches: token sequences that grow from its prompt, each in a cache row."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError, ProcessorError, text_of
from llmc.runtime.api.handle import OutputCollector
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Delta, GenerationResult, Output, Timings, Usage
from llmc.runtime.kv.rows import Slot
from llmc.runtime.observe.metrics import RequestTimeline
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.samplers import Choice
from llmc.runtime.sessions.adapters import Adapter

# Tokens at the start of the context that stay when the window slides: attention rests on them.
# Xiao et al., Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453
SINK_TOKENS = 4

_KEYS, _NUMBERS = itertools.count(), itertools.count()
_S = TypeVar("_S", bound="Branch")


class Branch(Slot, ABC):
    """One of the token sequences that grow from a request's prompt, mostly in a row of the cache."""

    context: list[int]
    speculates = False  # whether it may propose drafts
    is_fed = True  # whether its context is fed before it decodes

    def __init__(self, group: "BranchGroup[Any]", context: list[int]) -> None:
        super().__init__(context, images=group.request.request.images)
        self.key = next(_KEYS)  # its name for drafters
        self.group = group
        self.reused = 0  # tokens that the prefix cache put into its row
        self.states: tuple[int, NDArray[np.float32] | None] = (0, None)  # last copy of the row's, after so many tokens
        self.long = False  # whether ropes have the factors of long texts
        self.switched = False  # whether it became long while it ran

    @property
    def request(self) -> "RequestState":
        return self.group.request

    @property
    def adapter(self) -> Adapter | None:
        return self.group.request.adapter

    @property
    def holds_prompt(self) -> bool:
        """True while its row begins with the whole prompt."""
        length = len(self.request.prompt)
        begins = self.context[:length] == self.request.prompt and not self.switched
        return self.row >= 0 and self.cached >= length and begins

    @property
    def room(self) -> int:
        """Positions that it needs at once."""
        return len(self.context)

    @property
    def begun(self) -> bool:
        """True once a chunk was fed."""
        return self.cached > self.reused

    @property
    def wants_every_logit(self) -> bool:
        """True if the next chunk is part of a prompt whose every position counts."""
        return self.group.wants_prompt and self.cached < len(self.request.prompt) and not self.switched

    @property
    def prefix_names(self) -> list[str]:
        """Names of all that its cached keys and values depend on, beside tokens."""
        adapter, *scope = self.request.prefix_names
        return [f"{adapter} long" if self.long else adapter, *scope]

    def slide(self, keep: int) -> int:
        """Leave out the middle of the context and keep ``keep`` tokens, to be fed anew; the number left out."""
        before = len(self.context)
        self.context = [*self.context[:SINK_TOKENS], *self.context[before - keep + SINK_TOKENS :]]
        self.begin_anew()
        return before - keep

    def begin_anew(self) -> None:
        """Forget what its row holds, to be fed again."""
        self.cached = self.reused = self.stop = 0
        self.states = 0, None

    def propose(self, room: int, rows: int) -> list[int]:
        """Drafts of its next tokens, at most ``room``, in a step of ``rows`` rows."""
        return []

    @abstractmethod
    def sample(self, logits: Logits) -> "SamplerOutput[Any]":
        """Sample from logits [1 + drafts, V] now, because the next call overwrites them; errors go into the output."""

    def close(self) -> None:
        self.drafts = []


@dataclass
class SamplerOutput(Generic[_S]):
    """One branch's part of a step: tokens of a sample, logits [V] for a search, or an error."""

    branch: _S
    choices: list[Choice] = field(default_factory=list)
    logits: Logits | None = None
    error: BaseException | None = None

    @property
    def tokens(self) -> int:
        """Number of fed tokens (last token and drafts) that were accepted."""
        return max(1, len(self.choices)) if self.branch.window is None else 0


class BranchGroup(ABC, Generic[_S]):
    """The ``branches`` of one request that hold a row: samples side by side, or the beams of a search."""

    width = 1  # rows that the first branch waits for

    def __init__(self, request: "RequestState") -> None:
        self.request = request
        self.branches: list[_S] = []

    @property
    def promised(self) -> int:
        """Rows that it will still fork into."""
        return 0

    @property
    def prompt_is_known(self) -> bool:
        """True once :meth:`begin` can do without logits."""
        return False

    @property
    def wants_prompt(self) -> bool:
        """True if every position of the prompt has to be computed."""
        return self.request.params.prompt_logprobs is not None

    @abstractmethod
    def branch(self, index: int) -> _S:
        """A new branch that holds the prompt."""

    @abstractmethod
    def begin(self, scheduler: Any, branch: _S, logits: Logits | None) -> bool:
        """Go on from the logits [V] after the whole context, None for a fork of the prompt. True: the request ends."""

    @abstractmethod
    def step(self, scheduler: Any, outputs: Sequence[SamplerOutput[_S]]) -> bool:
        """Take in the outputs of a step. True: the request ends."""

    @abstractmethod
    def outputs(self) -> list[Output]:
        """The finished outputs; ranked ones best first."""


class RequestState:
    """A request in the engine: as it came, its ``params`` with a seed, and the ``prompt`` after truncation."""

    group: BranchGroup[Any]

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        prompt: Sequence[int],
        collector: OutputCollector,
        timeline: RequestTimeline,
        adapter: Adapter | None = None,
    ) -> None:
        self.number = next(_NUMBERS)
        self.request = request
        self.params = params
        self.prompt = list(prompt)
        self.collector = collector
        self.timeline = timeline
        self.adapter = adapter
        scope = [] if request.prefix_scope is None else [request.prefix_scope]
        self.prefix_names = ["" if adapter is None else adapter.info.sha256, *scope]
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.truncated_tokens = 0
        self.place: tuple[int, int] = (0, 0)  # in the queue
        self.comparing = False  # True while its finished samples are compared

    def release(self) -> None:
        """Free what it holds: the place of an adapter is free after the last request for it."""
        self.adapter = None

    @property
    def deadline(self) -> float:
        """Moment at which it fails, on the monotonic clock."""
        limit = self.request.deadline_s
        return float("inf") if limit is None else self.timeline.queued + limit

    @property
    def final_length(self) -> int:
        """Positions that it takes at most."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def streams(self) -> int:
        """Number of outputs that it streams."""
        return max(self.params.best_of or self.params.n, self.params.num_return_sequences or 1)

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens * self.streams

    def progress(self) -> str:
        """Its progress, for messages."""
        if self.timeline.admitted is None:
            return "it was still waiting in the queue"
        tokens = self.timeline.output_tokens
        return f"{tokens} tokens were generated by then" if tokens else "its prompt was still being fed"

    def emit(self, delta: Delta, timed: bool = True) -> None:
        """Hand a piece to the client; ``timed`` if its tokens came just now."""
        if delta.token_ids and timed:
            self.timeline.token(len(delta.token_ids), output=delta.index)
        if self.request.on_delta is not None:
            try:
                self.request.on_delta(delta)
            except BaseException as error:  # a client's function may raise anything
                raise ProcessorError(f"on_delta raised {text_of(error)}") from error
        self.collector.put(delta)

    def result(self, outputs: Sequence[Output]) -> GenerationResult:
        metrics = self.timeline.metrics()
        if self.params.num_beams > 1:
            completion = sum(len(output.token_ids) for output in outputs)
        else:
            completion = metrics.output_tokens
        seeds = [output.seed for output in outputs if output.seed is not None]
        ttft = metrics.ttft_s or 0.0
        return GenerationResult(
            outputs=tuple(outputs),
            usage=Usage(len(self.prompt), completion, metrics.cached_tokens, self.truncated_tokens),
            timings=Timings(
                ttft_s=ttft,
                decode_s=(metrics.e2e_s or ttft) - ttft,
                prompt_tokens=len(self.prompt) - metrics.cached_tokens,
                decode_tokens=max(len(output.token_ids) for output in outputs) - 1,
                queue_s=metrics.queue_s or 0.0,
            ),
            params=self.params if self.params.seed is not None or not seeds else replace(self.params, seed=seeds[0]),
            metrics=metrics,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
        )


def name_error(error: BaseException) -> BaseException:
    """``error`` as clients see it: ours as they are, anything else named as a bug."""
    if isinstance(error, LlmcError):
        return error
    wrapped = LlmcError(f"llmc failed inside ({text_of(error)}); please report it")
    wrapped.__cause__ = error
    return wrapped
