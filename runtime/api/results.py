"""Results of requests."""

from dataclasses import dataclass
from typing import Literal

from llmc.runtime.observe.metrics import RequestMetrics
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.sampling.params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: of the prompt as fed and those of it from the prefix cache, of all outputs together, and
    those left out because the context was full (``on_overflow``)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    truncated_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request.

    Attributes:
        ttft_s: from the request to the first token (time to first token), waiting included.
        decode_s: from the first token to the last.
        prompt_tokens, decode_tokens: tokens that these times were spent on.
        queue_s: from the request to the first chunk of its prompt.
    """

    ttft_s: float
    decode_s: float
    prompt_tokens: int
    decode_tokens: int
    queue_s: float = 0.0

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
    """A piece of one output, final once it is there.

    Attributes:
        index: which output of the request.
        text: often empty, for a character or a possible stop string may be incomplete.
        token_ids: the tokens that came with it.
        logprobs: of these tokens, where the request asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Output:
    """One completion.

    Attributes:
        index: which sample it is; its draws came from the request's seed + index.
        text: the completion without the stop string or token that ended it, unless the request keeps them.
        token_ids: every token, the one that ended it included.
        finish_reason: ``stop`` (end of sequence, stop token, stop string or stopping criterion) or ``length``.
        seed: what the random draws came from; None when nothing was drawn. The same seed gives the same tokens.
        score: what the outputs were ranked by (beam search, best_of, consensus); None where they were not.
        logprobs: one per token, where the request asked for them.
        stop_reason: the stop string, or the token of the request's ``stop_token_ids``, that ended it; None for an end
            of sequence and everything else.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int | None = None
    score: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A finished request. ``text``, ``token_ids``, ``finish_reason``, ``stop_reason`` and ``seed`` are those of its
    first output.

    Attributes:
        outputs: as many as asked for; the best first where they are ranked.
        params: the request's parameters, with the checkpoint's defaults and the seed filled in.
        prompt_logprobs: of every prompt token but the first, where the request asked for them.
        metrics: what it cost, step by step.
    """

    outputs: tuple[Output, ...]
    usage: Usage
    timings: Timings
    params: SamplingParams
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

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
