"""A model of the command line's tests: it notes how it is loaded, asked and closed, and answers ``ab``."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmc.errors import CancelledError
from llmc.runtime import GenerationResult, Output, SamplingParams, Timings, Usage
from llmc.runtime.api.chat import MessageDelta
from llmc.runtime.observe.metrics import RequestMetrics
from llmc.runtime.sampling.logprobs import TokenLogprobs

LOGPROBS = (TokenLogprobs(1, -0.5, ((1, -0.5),)), TokenLogprobs(2, -math.inf, ()))
RESULT = GenerationResult(
    (Output(0, "ab", (1, 2), "stop", 42, logprobs=LOGPROBS, stop_reason="END"),),
    Usage(7, 2),
    Timings(0.5, 0.25, 7, 1),
    SamplingParams(seed=42, json_schema={"type": "object"}),
    RequestMetrics(0.1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.75, 7, 0, 2, 0, 0, 0, "stop"),
)


class FakeHandle:
    """Two pieces of text; ``between`` is called between the two, and may raise."""

    def __init__(self, between: Callable[["FakeHandle"], None], result: GenerationResult) -> None:
        self.between, self.ended, self.cancelled = between, result, False

    def deltas(self) -> Iterator[MessageDelta]:
        if not self.cancelled:
            yield MessageDelta(0, "", "hm", ())
            yield MessageDelta(0, "a", "", ())
            self.between(self)
        if self.cancelled:
            raise CancelledError("the request was cancelled")
        yield MessageDelta(0, "b", "", ())

    def __iter__(self) -> Iterator[str]:
        return (delta.content for delta in self.deltas())

    def result(self) -> GenerationResult:
        return self.ended

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def close(self) -> None:
        """There is nothing to free."""


class FakeModel:
    """Takes notes.

    Attributes:
        loads: what it was loaded with, each time.
        unloadable: errors of loading, by path.
        events: ``load`` and ``close``, in order.
        asked: prompts as texts, and conversations as lists of messages.
        sampling: the parameters of each that were given.
        closed: whether it was.
        between: called within each answer.
        ended: the result of each answer.
        encode: makes of a text a list as long as its tokens.
    """

    def __init__(self) -> None:
        self.folder, self.chat_template, self.tower = Path("tiny"), None, None
        self.manifest = SimpleNamespace(source=SimpleNamespace(name="tiny"))
        snapshot = SimpleNamespace(output_tokens=6, prompt_tokens=21, prefix_hit_tokens=8)
        self.engine = SimpleNamespace(max_context=128, metrics=SimpleNamespace(snapshot=lambda: snapshot))
        self.loads: list[dict[str, Any]] = []
        self.unloadable: dict[Path, BaseException] = {}
        self.events: list[str] = []
        self.asked: list[Any] = []
        self.sampling: list[dict[str, Any]] = []
        self.closed = False
        self.between: Callable[[FakeHandle], None] = lambda handle: None
        self.ended = RESULT
        self.encode: Callable[[str], list[Any]] = lambda text: [len(text), False]

    def load(self, bundle: Path, **options: Any) -> "FakeModel":
        self.loads.append({"bundle": bundle, **options})
        self.events.append("load")
        if error := self.unloadable.get(Path(bundle)):
            raise error
        return self

    @property
    def loaded(self) -> dict[str, Any]:
        """What it was loaded with last; empty if it was not."""
        return self.loads[-1] if self.loads else {}

    def stream(self, prompt: str, **sampling: Any) -> FakeHandle:
        self.asked.append(prompt)
        self.sampling.append({name: value for name, value in sampling.items() if value is not None})
        return FakeHandle(self.between, self.ended)

    def stream_chat(self, messages: list[dict[str, Any]], **sampling: Any) -> FakeHandle:
        return self.stream([dict(message) for message in messages], **sampling)  # type: ignore[arg-type]

    def chat_tokens(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, on_overflow: str | None = None
    ) -> list[Any]:
        return self.encode("".join(message["content"] for message in messages) + "?" * add_generation_prompt)

    def __enter__(self) -> "FakeModel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.events.append("close")
        self.closed = True


def failing(error: BaseException) -> Callable[[FakeHandle], None]:
    """A ``between`` that raises."""

    def fail(handle: FakeHandle) -> None:
        raise error

    return fail
