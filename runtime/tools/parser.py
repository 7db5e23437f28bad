"""An output as it comes, told apart into reasoning, answer and calls; of nothing is more handed on than is certain."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.runtime.tools.calls import CallFormat, Tool, ToolCallDelta
from llmc.runtime.tools.source import BLANKS, Arguments, Called, Content, Event, Reading, Source, Thought
from llmc.runtime.tools.thinking import ThinkingMarks
from llmc.runtime.tools.unmarked import UnmarkedCalls


@dataclass(frozen=True)
class Parsed:
    """The part of an output that became certain: any of the three may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ChatParser:
    """One output of a conversation, from text to what clients get. What it gives in all does not depend on the pieces
    in which the text comes.

    Line ends around reasoning, and blanks around calls, belong to the format and are left out. What begins like a call
    and is none is content; what breaks off after its name is a call with what was written of its arguments, and what
    the length cut off before that is left out.

    Args:
        calls: the format of calls; None reads none.
        marks: what encloses reasoning; None reads none.
        thinking: True if the prompt has opened the reasoning already.
        new_id: gives the id of a call, by its index.
        shaped: an answer is calls from its beginning on or has a form, in which calls are not looked for.
        unmarked: reads an answer that is calls without the format's marks; None takes it for content.
        whole: hand calls on when they are whole; the text of one that breaks off, other than by length, is content.
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
        self._is_plain = False  # all that comes is content
        self._broke_off = False  # the last call, which became content
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
        """The rest: nothing more comes; ``cut`` where the output had not come to its end."""
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
        """The order of an output: reasoning, if any, then the answer and its calls."""
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
        held = ""  # line ends that may be the last ones
        ended = False
        while not ended:
            piece, ended = yield from source.before((marks.end,))
            text = held + piece
            held = text[len(text.rstrip("\n")) :]
            if len(text) > len(held):
                yield Thought(text[: len(text) - len(held)])
            ended = ended or (source.ended and not source.rest)
        source.at += len(marks.end) if source.text.startswith(marks.end, source.at) else 0
        yield from self._skip_line_ends()

    def _skip_line_ends(self) -> Reading[None]:
        while (yield from self._source.peek()) == "\n":
            self._source.at += 1

    def _is_form(self, form: CallFormat) -> Reading[bool]:
        """True if the answer does not begin like a call, blanks aside."""
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
        """Content, and calls in it. Blanks are held until it is known whether they are next to a call."""
        source = self._source
        called = bool(form.bare_starts) and (yield from self._read_bare(form)) and not self._broke_off
        held = ""
        while True:
            piece, at_mark = yield from source.before(form.begins)
            text = held + piece
            held = text[len(text.rstrip(BLANKS)) :]
            if len(text) > len(held):
                called = False
                yield Content(text[: len(text) - len(held)])
            if at_mark:
                start = source.at
                if (yield from self._read_call(form, held)):
                    held, called = "", not self._broke_off
                else:
                    source.at = start + 1
                    held += source.text[start]
            elif source.ended and not source.rest:
                break
        if held and not (called and not held.strip(BLANKS)):
            yield Content(held)

    def _read_bare(self, form: CallFormat) -> Reading[bool]:
        """Read an answer that is a call from its first character on; False if it is none."""
        source, start = self._source, self._source.at
        yield from source.skip_blanks()
        blanks = source.text[start : source.at]
        if (yield from source.peek()) in form.bare_starts and (yield from self._read_call(form, blanks, bare=True)):
            return True
        source.at = start
        return False

    def _read_call(self, form: CallFormat, blanks: str, bare: bool = False) -> Reading[bool]:
        """Read calls after ``blanks``; True also where the output was cut off while one could have followed, which is
        left out."""
        source, start, waited = self._source, self._source.at, False
        reading = form.read(source, self._tools)
        if self._whole:
            reading = self._read_whole(reading, blanks)
        while True:
            try:
                event = next(reading)
            except StopIteration as ended:
                found = bool(ended.value)
                break
            if bare and isinstance(event, Called) and event.name not in self._tools:
                source.keeps = False
                return False
            yield event
            waited = waited or (event is None and source.ended)
        if not waited or not source.cut or (bare and not found and not form.may_be_bare(source.text[start:])):
            return found
        source.at = len(source.text)
        return True

    def _read_whole(self, reading: Reading[bool], blanks: str) -> Reading[bool]:
        """Hand each call on when it is whole; one that is not, and was not cut off, is content with ``blanks`` before.

        A later call of the same marks that breaks off is content from the end of the call before it.
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
    """True if the arguments of a call are JSON."""
    try:
        json.loads("".join(event.text for event in call if isinstance(event, Arguments)), strict=False)
    except (ValueError, RecursionError):
        return False
    return True
