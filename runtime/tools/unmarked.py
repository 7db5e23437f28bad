"""Calls without a format's marks: an answer that only consists of JSON call objects, with or without a fence.

Small models often write calls so, whatever their chat template teaches.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from llmc.runtime.tools.json_calls import ARGUMENTS, NAMES, read_key, read_name
from llmc.runtime.tools.json_values import read_string, read_value
from llmc.runtime.tools.source import Arguments, Called, Content, Event, Reading, Source, Thought

# Keys that OpenAI's and Cohere's call objects have besides name and arguments.
_OTHER_KEYS = ("id", "index", "tool_call_id", "type")

Call = dict[str, str]
"""The ``name`` of a tool, and the ``arguments`` as JSON text."""


class UnmarkedCalls:
    """Holds content back while all of it may be calls; yields calls if it ends as such.

    Args:
        tools: names that may be called.
        parallel: if False, only one call is read; an answer with several is content.
    """

    def __init__(self, tools: Collection[str], parallel: bool) -> None:
        self._source = Source()
        self._reading = _read_answer(self._source, tools, parallel)
        self._undecided = True

    def filter(self, events: Iterable[Event], ended: bool) -> Iterator[Event]:
        """The events, with content held back or turned into calls; ``ended`` is True for the last events."""
        for event in events:
            if self._undecided and isinstance(event, Content):
                self._source.text += event.text
                yield from self._decide()
            else:
                if self._undecided and not isinstance(event, Thought):  # a call with marks: the text before is content
                    self._undecided = False
                    yield Content(self._source.text)
                yield event
        if ended and self._undecided:
            self._source.ended = True
            yield from self._decide()

    def _decide(self) -> Iterator[Event]:
        try:
            next(self._reading)
        except StopIteration as read:
            self._undecided = False
            if not read.value:
                yield Content(self._source.text)
            for call in read.value or ():
                yield Called(call["name"])
                yield Arguments(call["arguments"])


def _read_answer(source: Source, tools: Collection[str], parallel: bool) -> Reading[list[Call] | None]:
    """The calls that make up the whole text; None as soon as other text comes."""
    calls: list[Call] = []
    yield from source.skip_blanks()
    while (yield from source.peek()):
        block_calls = yield from _read_block(source, tools)
        if block_calls is None or (len(calls) + len(block_calls) > 1 and not parallel):
            return None
        calls += block_calls
        yield from source.skip_blanks()
    return calls


def _read_block(source: Source, tools: Collection[str]) -> Reading[list[Call] | None]:
    closing = yield from _read_fence(source)
    calls = None if closing is None else (yield from _read_calls(source, tools))
    if calls and closing:
        yield from source.skip_blanks()
        if not (yield from source.take(closing)) and (yield from source.peek()):  # the answer may end inside the block
            return None
    return calls


def _read_fence(source: Source) -> Reading[str | None]:
    """Read the fence that begins here, such as ``` and a word, or ``<tools>``. Return its closing mark: empty if there
    is no fence, None if other text begins."""
    start, first = source.at, (yield from source.peek())
    if first == "<":
        source.at += 1
        name = yield from read_name(source)
        if not name or not (yield from source.take(">")):
            return None
        closing = f"</{name}>"
    elif first in ("`", "~"):
        while (yield from source.take(first)):
            pass
        closing = source.text[start : source.at]
        while (yield from source.take(" ")):
            pass
        yield from read_name(source)
    else:
        return ""
    yield from source.skip_blanks()
    return closing


def _read_calls(source: Source, tools: Collection[str]) -> Reading[list[Call] | None]:
    """The calls in a list, or in objects separated by commas, semicolons or nothing."""
    listed = yield from source.take("[")
    calls: list[Call] = []
    more = True
    while more:
        yield from source.skip_blanks()
        call = yield from _read_call(source, tools)
        if call is None or len(call) < 2:
            return None
        calls.append(call)
        yield from source.skip_blanks()
        more = yield from source.take(",")
        if not more and not listed:
            more = (yield from source.take(";")) or (yield from source.peek()) == "{"
    return None if listed and not (yield from source.take("]")) else calls


def _read_call(source: Source, tools: Collection[str]) -> Reading[Call | None]:
    """Read a call object; None as soon as it has an unknown member."""
    call: Call = {}
    more = yield from source.take("{")
    while more:
        member = yield from _read_member(source, tools)
        if member is None or member.keys() & call.keys():
            return None
        call |= member
        yield from source.skip_blanks()
        more = yield from source.take(",")
    return call if call and (yield from source.take("}")) else None


def _read_member(source: Source, tools: Collection[str]) -> Reading[Call | None]:
    """Read one member of an object: its part of the call, if any; None if calls have no such member."""
    key = yield from read_key(source)
    if key == "function" and (yield from source.peek()) == "{":
        return (yield from _read_call(source, tools))
    if key in (*NAMES, "function"):
        name = yield from read_string(source)
        return {"name": name} if name is not None and name in tools else None
    if key in ARGUMENTS:
        is_object = (yield from source.peek()) in ("{", '"')
        text = (yield from read_value(source)) if is_object else None
        arguments = None if text is None else _object_text(text)
        return None if arguments is None else {"arguments": arguments}
    return {} if key in _OTHER_KEYS and (yield from read_value(source)) is not None else None


def _object_text(text: str) -> str | None:
    """An object, or a string that contains one, as JSON text, unchanged if strict; None for any other value."""
    try:
        value = _parse(text, strict=False)
        if isinstance(value, str):
            value, text = _parse(value, strict=False), ""
        if not isinstance(value, dict):
            return None
        with suppress(ValueError):
            _parse(text, strict=True)
            return text
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None


def _parse(text: str, strict: bool) -> Any:
    """Parse a JSON value; ``strict`` refuses line ends in strings. Raises ValueError: not JSON, such as NaN."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    return json.loads(text, strict=strict, parse_constant=refuse)
