"""Values in notations other than JSON, such as Python's, streamed as JSON."""

import json
import re
from dataclasses import dataclass

from llmc.runtime.tools.json_values import find_quote, stream_text
from llmc.runtime.tools.source import BLANKS, Arguments, Reading, Source

_DEEPEST = 64
_LONGEST_KEY = 1024
_JSON_ESCAPES = {"\\'": "'", '"': '\\"'}  # where JSON differs from Python
_ESCAPE = re.compile(r"\\.|\"", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Literals:
    """A notation for values.

    Args:
        quotes: texts that begin and end strings.
        escapes: True if backslashes escape in strings, as in Python; else they are ordinary characters.
    """

    quotes: tuple[str, ...]
    escapes: bool

    def stream(self, source: Source, depth: int = 0) -> Reading[bool]:
        """Yield the value that begins here; False if it has no end or is not a value."""
        for quote in self.quotes:
            if (yield from source.take(quote)):
                return (yield from self._stream_string(source, quote))
        if depth > _DEEPEST:
            return False
        if (yield from source.take("{")):
            return (yield from self._stream_items(source, "{", "}", depth))
        if (yield from source.take("[")):
            return (yield from self._stream_items(source, "[", "]", depth))
        return (yield from _stream_word(source))

    def _stream_items(self, source: Source, opening: str, closing: str, depth: int) -> Reading[bool]:
        yield Arguments(opening)
        comma = ""
        yield from source.skip_blanks()
        while not (yield from source.take(closing)):
            if not (yield from source.peek()):
                return False
            if comma:
                yield Arguments(comma)
            comma = ", "
            if opening == "{" and not (yield from self._stream_key(source)):
                return False
            if not (yield from self.stream(source, depth + 1)):
                return False
            yield from source.skip_blanks()
            yield from source.take(",")
            yield from source.skip_blanks()
        yield Arguments(closing)
        return True

    def _stream_key(self, source: Source) -> Reading[bool]:
        for quote in self.quotes:
            if (yield from source.take(quote)):
                if not (yield from self._stream_string(source, quote)):
                    return False
                yield from source.skip_blanks()
                if not (yield from source.take(":")):
                    return False
                break
        else:
            key = yield from source.until(":", _LONGEST_KEY)
            if key is None:
                return False
            yield Arguments(json.dumps(key.strip(), ensure_ascii=False))
        yield Arguments(": ")
        yield from source.skip_blanks()
        return True

    def _stream_string(self, source: Source, quote: str) -> Reading[bool]:
        if self.escapes:
            return (yield from _stream_escaped(source, quote))
        return (yield from stream_text(source, quote))


def _stream_escaped(source: Source, quote: str) -> Reading[bool]:
    """Yield a string with escapes once its end has come."""
    at = yield from find_quote(source, quote, source.at)
    if at is None:
        return False
    written = source.text[source.at : at]
    source.at = at + 1
    try:
        value = json.loads(
            f'"{_ESCAPE.sub(lambda escape: _JSON_ESCAPES.get(escape[0], escape[0]), written)}"', strict=False
        )
    except ValueError:  # an escape of Python's that JSON lacks is kept as it is
        value = written
    yield Arguments(json.dumps(value, ensure_ascii=False))
    return True


def _stream_word(source: Source) -> Reading[bool]:
    """Yield a number or a word; a word that JSON lacks becomes a string."""
    start = source.at
    while (character := (yield from source.peek())) and character not in BLANKS + ",)]}":
        source.at += 1
    word = source.text[start : source.at]
    word = _WORDS.get(word, word)
    if not word or not character:
        return False
    try:
        json.loads(word)
    except ValueError:
        word = json.dumps(word, ensure_ascii=False)
    yield Arguments(word)
    return True
