"""Chat messages for clients, with reasoning and tool calls: complete, or as they come."""

import secrets
import string
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from llmc.runtime.api.handle import Handle, OutputCollector
from llmc.runtime.api.results import Delta, GenerationResult, Output
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.tools.calls import ToolCall as ToolCall
from llmc.runtime.tools.calls import ToolCallDelta as ToolCallDelta
from llmc.runtime.tools.parser import AnswerParser, Parsed

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


@dataclass(frozen=True)
class MessageDelta:
    """The part of message number ``index`` that became certain with ``token_ids``; content, reasoning and calls may all
    be empty; ``logprobs`` are set if the request asked for them."""

    index: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Message:
    """An answer."""

    content: str  # its text, without reasoning and calls; may be empty
    reasoning: str | None = None  # None: the model did not reason
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"  # ``tool_calls`` if there are any

    def to_dict(self) -> dict[str, Any]:
        """The message in OpenAI's format, to append to a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass(frozen=True)
class ChatResult(GenerationResult):
    """A finished answer: a message for each of ``outputs``, which hold the model's raw texts, including reasoning,
    calls and their marks. ``text`` is the content of the first message."""

    messages: tuple[Message, ...] = ()

    @property
    def message(self) -> Message:
        return self.messages[0]

    @property
    def text(self) -> str:
        return self.message.content


def new_id() -> str:
    """The id of a call: nine letters and digits."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class ChatHandle(Handle):
    """A submitted conversation: a :class:`llmc.runtime.api.handle.Handle` that also yields messages.

    Iterating yields only the answer's content; ``deltas()`` yields content, reasoning and calls as they come;
    ``result()`` waits for the complete answer. Each piece goes to one reader only. ``parser`` makes the parser of an
    output, given a function that returns call ids.
    """

    def __init__(
        self,
        collector: OutputCollector,
        cancel: Callable[[], None],
        outputs: int,
        keep: bool,
        parser: Callable[[Callable[[int], str]], AnswerParser],
    ) -> None:
        super().__init__(collector, cancel, outputs, keep)
        self._new_parser = parser
        self._parsers: dict[int, AnswerParser] = {}
        self._parsed: dict[int, Parsed] = {}
        self._ids: dict[tuple[int, int], str] = {}  # by output and call, shared by deltas and messages
        self._chat_result: ChatResult | None = None

    def deltas(self, timeout: float | None = None) -> Iterator[MessageDelta]:
        """Every piece of every message, as it comes. Errors as in :meth:`result`; TimeoutError after ``timeout`` s."""
        for delta in self.events(timeout):
            yield self._message_delta(delta)
        yield from self._last_deltas()

    async def deltas_async(self) -> AsyncIterator[MessageDelta]:
        async for delta in self.events_async():
            yield self._message_delta(delta)
        for last in self._last_deltas():
            yield last

    def result(self, timeout: float | None = None) -> ChatResult:
        return self._chat(super().result(timeout))

    def __await__(self) -> Generator[Any, None, ChatResult]:
        return self._chat((yield from super().__await__()))

    def _text(self, delta: Delta) -> str:
        return self._message_delta(delta).content

    def _last_text(self) -> str:
        return "".join(last.content for last in self._last_deltas())

    def _message_delta(self, delta: Delta) -> MessageDelta:
        index = delta.index
        if index not in self._parsers:
            self._parsers[index] = self._parser(index)
        parsed = self._parsers[index].push(delta.text)
        return MessageDelta(index, parsed.content, parsed.reasoning, parsed.calls, delta.token_ids, delta.logprobs)

    def _last_deltas(self) -> Iterator[MessageDelta]:
        """Pieces held back until the end; yielded once."""
        result = self._collector.result
        cut = {output.index for output in result.outputs if output.finish_reason == "length"} if result else set()
        for index, parser in sorted(self._parsers.items()):
            parsed = parser.finish(index in cut)
            if parsed.content or parsed.reasoning or parsed.calls:
                yield MessageDelta(index, parsed.content, parsed.reasoning, parsed.calls)

    def _parser(self, index: int) -> AnswerParser:
        return self._new_parser(lambda call: self._ids.setdefault((index, call), new_id()))

    def _chat(self, result: GenerationResult) -> ChatResult:
        if self._chat_result is None:
            known = {field.name: getattr(result, field.name) for field in fields(GenerationResult)}
            self._chat_result = ChatResult(**known, messages=tuple(map(self._message, result.outputs)))
        return self._chat_result

    def _message(self, output: Output) -> Message:
        parser = self._parser(output.index)
        pieces = [parser.push(output.text), parser.finish(output.finish_reason == "length")]
        calls: list[ToolCall] = []
        for piece in (delta for parsed in pieces for delta in parsed.calls):
            if piece.id is not None and piece.name is not None:
                calls.append(ToolCall(piece.id, piece.name, piece.arguments))
            else:
                last = calls.pop()
                calls.append(ToolCall(last.id, last.name, last.arguments + piece.arguments))
        reasoning = "".join(parsed.reasoning for parsed in pieces)
        reason = "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
        return Message("".join(parsed.content for parsed in pieces), reasoning or None, tuple(calls), reason)
