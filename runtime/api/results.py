"""Results of requests."""

from dataclasses import dataclass
from typing import Literal

from llmc.runtime.observe.metrics import RequestMetrics
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.sampling.params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int  # as fed
    completion_tokens: int  # of all outputs together
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    truncated_tokens: int = 0  # left out because the context was full (``on_overflow``)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request, and the number of tokens they were spent on."""

    ttft_s: float  # from the request to the first token (time to first token), waiting included
    decode_s: float  # from the first token to the last
    prompt_tokens: int
    decode_tokens: int
    queue_s: float = 0.0  # from the request to the first chunk of its prompt

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first; 0 if there was only one."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of the time to first token."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens per second after the first; 0 if there was only one."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Delta:
    """A piece of one output; it does not change later."""

    index: int  # number of the output
    text: str  # often empty, while a character or a possible stop string is incomplete
    token_ids: tuple[int, ...]  # the new tokens
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, if asked for


@dataclass(frozen=True)
class Output:
    """One completion."""

    index: int  # number of the sample; it draws with the request's seed + index
    text: str  # without the stop string or token that ended it, unless the request keeps them
    token_ids: tuple[int, ...]  # every token, the one that ended it included
    finish_reason: FinishReason  # ``stop``: end of sequence, stop token or string, stopping criterion; or ``length``
    seed: int | None = None  # of the random draws; None: none were made. The same seed gives the same tokens.
    score: float | None = None  # that the outputs are ranked by (beam search, best_of, consensus); None: not ranked
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, if asked for
    stop_reason: str | int | None = None  # the stop string or the token of ``stop_token_ids`` that ended it


@dataclass(frozen=True)
class GenerationResult:
    """A finished request. ``text``, ``token_ids`` and so on are the first output's."""

    outputs: tuple[Output, ...]  # as many as asked for; ranked ones best first
    usage: Usage
    timings: Timings
    params: SamplingParams  # with the checkpoint's defaults and the seed filled in
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of every prompt token but the first, if asked for

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def seed(self) -> int | None:
        return self.outputs[0].seed
