"""Split an output, as it comes, into reasoning, answer and calls; yield only what can no longer change."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.runtime.tools.calls import CallFormat, Tool, ToolCallDelta
from llmc.runtime.tools.source import BLANKS, Arguments, Called, Content, Event, Reading, Source, Thought
from llmc.runtime.tools.thinking import ThinkingMarks
from llmc.runtime.tools.unmarked import UnmarkedCalls


@dataclass(frozen=True)
class Parsed:
    """The newly certain part of an output; any of the three may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(Protocol):
    """Parser of one output, text by text."""

    def push(self, text: str) -> Parsed:
        """The newly certain part of an output."""

    def finish(self, cut: bool = False) -> Parsed:
        """Parse the rest: no more text comes. ``cut`` is True if the output was cut off."""


class ChatParser:
    """Parser of one output of a conversation. The sum of its results does not depend on how the text is split.

    Line ends around reasoning and blanks around calls belong to the format and are dropped. Text that only looks like a
    call is content. A call that breaks off after its name keeps the arguments written so far; a beginning that the
    length limit cut off before the name is dropped.

    Args:
        calls: the format of calls; None reads none.
        marks: the marks around reasoning; None reads none.
        thinking: True if the prompt has already opened the reasoning.
        new_id: returns the id of a call, by its index.
        shaped: True if the answer must be calls only, or is guided; then calls are not searched for in its text.
        unmarked: reads an answer of calls without the format's marks; None treats it as content.
        whole: yield calls only when complete; a call that breaks off (not by the length limit) becomes content.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        tools: Mapping[str, Tool],
        marks: ThinkingMarks | None,
        thinking: bool,
        new_id: Callable[[int], str],
        *,
        shaped: bool = False,
        unmarked: UnmarkedCalls | None = None,
        whole: bool = False,
    ) -> None:
        self._shaped = shaped
        self._unmarked = unmarked
        self._whole = whole
        self._format = calls
        self._tools = tools
        self._marks = marks
        self._new_id = new_id
        self._source = Source()
        self._is_plain = False  # everything that follows is content
        self._broke_off = False  # the last call broke off and became content
        self._reader = self._read(thinking)
        self._calls = 0

    def push(self, text: str) -> Parsed:
        if self._is_plain:
            return Parsed(text)
        self._source.text += text
        events = []
        for event in self._reader:
            if event is None:
                break
            events.append(event)
        if self._unmarked is not None:
            events = list(self._unmarked.filter(events, self._source.ended))
        return self._collect_parsed(events)

    def finish(self, cut: bool = False) -> Parsed:
        """Parse the rest: no more text comes. ``cut`` is True if the output was cut off."""
        self._source.ended, self._source.cut = True, cut
        return self.push("")

    def _collect_parsed(self, events: Sequence[Event]) -> Parsed:
        deltas: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, Called):
                deltas.append(ToolCallDelta(self._calls, self._new_id(self._calls), event.name, ""))
                self._calls += 1
            elif isinstance(event, Arguments):
                last = deltas.pop() if deltas else ToolCallDelta(self._calls - 1, None, None, "")
                deltas.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + event.text))
        return Parsed(
            "".join(event.text for event in events if isinstance(event, Content)),
            "".join(event.text for event in events if isinstance(event, Thought)),
            tuple(deltas),
        )

    # ------------------------------------------------------------------------------------------------------ readers

    def _read(self, thinking: bool) -> Reading[None]:
        """Read an output in order: reasoning, if any, then the answer and its calls."""
        if self._marks is not None:
            yield from self._read_reasoning(self._marks, thinking)
        if self._format is not None and not (self._shaped and (yield from self._is_form(self._format))):
            yield from self._read_answer(self._format)
            return
        self._is_plain = True
        yield Content(self._source.rest)

    def _read_reasoning(self, marks: ThinkingMarks, thinking: bool) -> Reading[None]:
        source, start = self._source, self._source.at
        if not thinking:
            yield from source.skip_blanks()
            thinking = yield from source.take(marks.begin)
        if not thinking:
            source.at = start
            return
        yield from self._skip_line_ends()
        line_ends = ""  # may be the last ones of the reasoning
        ended = False
        while not ended:
            piece, ended = yield from source.before((marks.end,))
            text = line_ends + piece
            line_ends = text[len(text.rstrip("\n")) :]
            if len(text) > len(line_ends):
                yield Thought(text[: len(text) - len(line_ends)])
            ended = ended or (source.ended and not source.rest)
        source.at += len(marks.end) if source.text.startswith(marks.end, source.at) else 0
        yield from self._skip_line_ends()

    def _skip_line_ends(self) -> Reading[None]:
        while (yield from self._source.peek()) == "\n":
            self._source.at += 1

    def _is_form(self, form: CallFormat) -> Reading[bool]:
        """True if the answer, after its blanks, does not begin like a call."""
        source, start, written = self._source, self._source.at, ""
        heads = ["".join(head.split()) for head in (*form.begins, *form.bare_heads(self._tools))]
        while written not in heads and any(head.startswith(written) for head in heads):
            character = yield from source.peek()
            if not character:
                break
            written += character.strip()
            source.at += 1
        source.at = start
        return written not in heads

    def _read_answer(self, form: CallFormat) -> Reading[None]:
        """Read content and the calls in it. Blanks wait until it is known whether a call is next to them."""
        source = self._source
        called = bool(form.bare_starts) and (yield from self._read_bare(form)) and not self._broke_off
        blanks = ""
        while True:
            piece, at_mark = yield from source.before(form.begins)
            text = blanks + piece
            blanks = text[len(text.rstrip(BLANKS)) :]
            if len(text) > len(blanks):
                called = False
                yield Content(text[: len(text) - len(blanks)])
            if at_mark:
                start = source.at
                if (yield from self._read_call(form, blanks)):
                    blanks, called = "", not self._broke_off
                else:
                    source.at = start + 1
                    blanks += source.text[start]
            elif source.ended and not source.rest:
                break
        if blanks and not (called and not blanks.strip(BLANKS)):
            yield Content(blanks)

    def _read_bare(self, form: CallFormat) -> Reading[bool]:
        """Read an answer that is a call from its first character on; False if it is not."""
        source, start = self._source, self._source.at
        yield from source.skip_blanks()
        blanks = source.text[start : source.at]
        if (yield from source.peek()) in form.bare_starts and (yield from self._read_call(form, blanks, bare=True)):
            return True
        source.at = start
        return False

    def _read_call(self, form: CallFormat, blanks: str, bare: bool = False) -> Reading[bool]:
        """Read calls after ``blanks``; True, too, if the output was cut off (and is dropped) where one could follow."""
        source, start, waited = self._source, self._source.at, False
        reading = form.read(source, self._tools)
        if self._whole:
            reading = self._read_whole(reading, blanks)
        while True:
            try:
                event = next(reading)
            except StopIteration as ended:
                has_calls = bool(ended.value)
                break
            if bare and isinstance(event, Called) and event.name not in self._tools:
                source.keeps = False
                return False
            yield event
            waited = waited or (event is None and source.ended)
        if not waited or not source.cut or (bare and not has_calls and not form.may_be_bare(source.text[start:])):
            return has_calls
        source.at = len(source.text)
        return True

    def _read_whole(self, reading: Reading[bool], blanks: str) -> Reading[bool]:
        """Yield each call when it is complete; a call that breaks off, but was not cut off, becomes content after
        ``blanks``.

        If a later call between the same marks breaks off, content begins after the end of the call before it.
        """
        source = self._source
        start = end = source.at
        call: list[Event] = []

        def release(upto: int) -> Iterator[Event]:
            self._broke_off = not (source.cut or not call or _is_whole(call))
            yield from [Content(blanks + source.text[start:upto])] if self._broke_off else call

        while True:
            try:
                event = next(reading)
            except StopIteration as ended:
                source.keeps = False
                yield from release(source.at)
                return bool(ended.value)
            if isinstance(event, Called):
                source.keeps = True
                if call:
                    yield from release(end)
                    start, blanks = end, ""
                call = [event]
            elif isinstance(event, Arguments):
                call.append(event)
                end = source.at
            else:
                yield event


def _is_whole(call: Sequence[Event]) -> bool:
    try:
        json.loads("".join(event.text for event in call if isinstance(event, Arguments)), strict=False)
    except (ValueError, RecursionError):
        return False
    return True
