"""A request to an OpenAI-compatible server as its client sees it: when each piece came, or what failed."""

import json
from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.bench.wire import Failure, Reply

DONE = b"[DONE]"
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # of a delta; each is output
LONGEST_MESSAGE = 300  # characters of a server's words


@dataclass(eq=False)
class Exchange:
    """Moments are those of ``time.perf_counter``.

    Attributes:
        due: when it was to be sent; in a closed loop, when it was.
        sent: when it was, which is later if the client was late.
        chunks: when each piece of output came. A role, a finish reason or a count alone is none.
        ended: when the answer had ended, or failed.
        prompt_tokens, completion_tokens: as the server counted them, None if it did not.
        finished: a finish reason or the mark of the stream's end came.
        failure: why there is no whole answer.
    """

    due: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finished: bool = False
    failure: Failure | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the output: the server's count, or else one for each piece."""
        return self.completion_tokens or len(self.chunks)

    @property
    def ttft(self) -> float:
        """Time to first token, seconds from sending."""
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last piece of output."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None where there is no second one."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def late(self) -> float:
        """Seconds by which the client was late."""
        return self.sent - self.due

    def note(self, moment: float, data: bytes) -> None:
        """An event came."""
        if data == DONE:
            self.finished = True
            return
        try:
            chunk = json.loads(data)
            self._count(chunk.get("usage"))
            if "error" in chunk:
                self.fail("error in the stream", str(chunk["error"]))
            outputs = [self._holds_output(choice) for choice in chunk.get("choices") or ()]
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.fail("malformed chunk", data[:LONGEST_MESSAGE].decode(errors="replace"))
            return
        if any(outputs):
            self.chunks.append(moment)

    def _count(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.prompt_tokens, self.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")

    def _holds_output(self, choice: dict[str, Any]) -> bool:
        self.finished = self.finished or choice.get("finish_reason") is not None
        delta = choice.get("delta") or {}
        return bool(choice.get("text")) or any(delta.get(name) for name in TEXTS)

    def close(self, moment: float, reply: Reply) -> None:
        """The answer has ended; what it lacks is a failure."""
        self.ended = moment
        if reply.failure is not None:
            self.fail(reply.failure.kind, reply.failure.message)
        elif reply.status != 200:
            self.fail(f"HTTP {reply.status}", reply.body.decode(errors="replace"))
        elif not reply.headers.get("content-type", "").startswith("text/event-stream"):
            self.fail("no event stream", reply.body.decode(errors="replace"))
        elif not self.finished:
            self.fail("cut short", "the stream ended without a finish reason and without [DONE]")
        elif not self.chunks:
            self.fail("no output", "the stream had no piece of text; is max_tokens spent on what is not shown?")

    def fail(self, kind: str, message: str) -> None:
        """Note a failure, unless there is an earlier one, which led to this."""
        self.failure = self.failure or Failure(kind, " ".join(message.split())[:LONGEST_MESSAGE])
