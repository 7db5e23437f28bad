"""JSON values in a text that comes in pieces: find their ends, and yield them as they are written."""

import json

from llmc.runtime.text.detokenizer import overlap
from llmc.runtime.tools.source import BLANKS, Arguments, Reading, Source

_OPENING = {"{": "}", "[": "]"}


def read_string(source: Source) -> Reading[str | None]:
    """Read and decode the string that begins here; None, reading nothing, if there is none or it has no end."""
    start = source.at
    if (yield from source.peek()) != '"':
        return None
    end = yield from find_quote(source, '"', start + 1)
    if end is None:
        return None
    try:
        value = json.loads(source.text[start : end + 1], strict=False)
    except ValueError:
        return None
    source.at = end + 1
    return str(value)


def find_quote(source: Source, quote: str, at: int) -> Reading[int | None]:
    """The position, from ``at`` on, of the unescaped quote that ends a string; None if it has no end."""
    while True:
        while at < len(source.text) and source.text[at] != quote:
            at += 2 if source.text[at] == "\\" else 1
        if at < len(source.text):
            return at
        if source.ended:
            return None
        yield None


def stream_text(source: Source, *ends: str) -> Reading[bool]:
    """Yield a text as a string, up to the first of ``ends``, which is read too; False if none of them comes."""
    yield Arguments('"')
    while True:
        rest = source.rest
        matches = [(start, len(end)) for end in ends if (start := rest.find(end)) >= 0]
        kept = 0 if source.ended else max(overlap(rest, end) for end in ends)
        start, length = min(matches, default=(len(rest) - kept, 0))
        if start:
            yield Arguments(json.dumps(rest[:start], ensure_ascii=False)[1:-1])
        source.at += start + length
        if matches:
            yield Arguments('"')
            return True
        if source.ended:
            return False
        yield None


def stream_value(source: Source) -> Reading[bool]:
    """Yield an object or a list as arguments, piece by piece; False, reading nothing, if none begins here.

    Only brackets and strings are tracked: if the text ends inside the value, all of it is yielded.
    """
    first = yield from source.peek()
    if first not in _OPENING:
        return False
    open_brackets, quoted, escaped = 0, False, False
    while True:
        start = source.at
        for character in source.text[start:]:
            source.at += 1
            if quoted:
                quoted, escaped = escaped or character != '"', character == "\\" and not escaped
            elif character == '"':
                quoted = True
            else:
                open_brackets += (character in "{[") - (character in "}]")
            if not open_brackets:
                break
        if source.at > start:
            yield Arguments(source.text[start : source.at])
        if not open_brackets or source.ended:
            return True
        yield None


def read_value(source: Source) -> Reading[str | None]:
    """The text of the value that begins here; None, reading nothing, if there is none or it has no end."""
    start = source.at
    character = yield from source.peek()
    if character == '"':
        yield from read_string(source)
    elif character in _OPENING:
        for event in stream_value(source):
            if event is None:
                yield None
    else:
        while (character := (yield from source.peek())) and character not in BLANKS + ",}]":
            source.at += 1
    text = source.text[start : source.at]
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        source.at = start
        return None
    return text
