"""What a request gives back."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request.

    Attributes:
        ttft_s: from the request to the first token (time to first token).
        decode_s: from the first token to the last.
        prompt_tokens, decode_tokens: tokens that these times were spent on.
    """

    ttft_s: float
    decode_s: float
    prompt_tokens: int
    decode_tokens: int

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
class GenerationResult:
    """A finished request.

    Attributes:
        text: the completion without the stop string or end-of-sequence token that ended it.
        token_ids: every sampled token, the one that ended it included.
        finish_reason: ``stop`` (end of sequence, stop token or stop string) or ``length`` (max_tokens).
        seed: what the random draws came from; None when greedy. The same seed gives the same tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    seed: int | None
