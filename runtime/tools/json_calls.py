"""Calls as JSON objects: on their own, in a list, or after a name; most model families use one of these formats."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import literal, move, schema_of, value_of
from llmc.runtime.tools.json_values import read_string, read_value, stream_value
from llmc.runtime.tools.source import Arguments, Called, Reading, Source

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonCalls(CallFormat):
    """An opening mark, an object or a list of them, a closing mark: ``{"name": ..., "arguments": {...}}``.

    Args:
        begins: marks that open a call or the list of calls; the template teaches the first.
        end: the closing mark; empty for none.
        pad: text between the marks and their content.
        between: text between two calls, with marks around each; None allows one call only.
        listed: True if one pair of marks encloses a list of calls.
        bare: True if an answer that begins with ``{`` is a call, too.
        keys: for name and arguments, as the template teaches; other keys are read, too.
        numbered: a key before the name, for the number of the call; empty for none.
        frame: special tokens around an answer without calls.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    pad: str = ""
    between: str | None = None
    listed: bool = False
    bare: bool = False
    keys: tuple[str, str] = ("name", "arguments")
    numbered: str = ""
    frame: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begins, self.end)

    @property
    def bare_starts(self) -> tuple[str, ...]:
        return ("{",) if self.bare else ()

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        objects = "\n".join(f"call_{i}: {self._object(tool)}" for i, tool in enumerate(tools))
        call = f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n{objects}\n"
        pad, end = literal(self.pad), spell(self.end)
        one = " ".join(filter(None, [pad, "call", pad, end]))
        if self.listed:
            more = f"({literal(', ')} call)* " if parallel else ""
            opening = "" if self.begins[0].endswith("[") else literal("[")
            return f"calls: {opening} call {more}{literal(']')} {end}\n{call}"
        if self.between is None or not parallel:
            return f"calls: {one}\n{call}"
        again = " ".join(filter(None, [literal(self.between), spell(self.begins[0])]))
        return f"calls: {one} ({again} {one})*\n{call}"

    def bare_grammar(self) -> str:
        return rf'\{{[ \n\t]*"{self.keys[0]}"'

    def bare_heads(self, names: Iterable[str]) -> list[str]:
        return [f"{{{self._head(name)}" for name in names] if self.bare else []

    def may_be_bare(self, text: str) -> bool:
        head, written = f'{{"{self.keys[0]}"', "".join(text.split())
        return head.startswith(written) or written.startswith(head)

    def _object(self, tool: Tool) -> str:
        head = self._head(tool.name)
        # As much as possible is one terminal: it competes with free text, and the longest match wins.
        opening = literal("{" + head)
        if self.numbered:
            number = literal(f'{{"{self.numbered}": "')
            opening = f"{number} /[0-9]{{1,2}}/ {literal(chr(34) + ', ' + head)}"
        return f"{opening} {schema_of(tool)} {literal('}')}"

    def _head(self, tool: str) -> str:
        name, arguments = self.keys
        return f'"{name}": "{tool}", "{arguments}": '

    def beside_json(self, tools: Sequence[Tool]) -> str:
        """The rule ``calls`` for one call without marks, in an answer that may also be other JSON."""
        name, arguments = self.keys
        calls = [
            {
                "type": "object",
                "properties": {name: {"const": tool.name}, arguments: move(tool.schema, f"/properties/{arguments}")},
                "required": [name, arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return f"calls: {' | '.join(map(value_of, calls))}\n"

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        name, arguments = self.keys
        written = []
        for number, (tool, given) in enumerate(calls):
            numbered = {self.numbered: str(number)} if self.numbered else {}
            written.append(json.dumps({**numbered, name: tool, arguments: given}, ensure_ascii=False))
        if self.bare:
            return "; ".join(written)
        begin = self.begins[0]
        if self.listed:
            return f"{begin}{'' if begin.endswith('[') else '['}{', '.join(written)}]{self.end}"
        return (self.between or "").join(f"{begin}{self.pad}{one}{self.pad}{self.end}" for one in written)

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        begin = yield from take_any(source, self.begins)
        yield from source.skip_blanks()
        closing = "]" if begin.endswith("[") or (yield from source.take("[")) else ""
        has_calls = yield from self._read_objects(source, listed=bool(closing))
        if has_calls and closing:
            yield from source.skip_blanks()
            yield from source.take(closing)
        if has_calls:
            yield from take_after_blanks(source, self.end)
        return has_calls

    def _read_objects(self, source: Source, listed: bool) -> Reading[bool]:
        has_calls, end = False, source.at
        while True:
            yield from source.skip_blanks()
            if not (yield from read_object(source)):
                source.at = end
                return has_calls
            has_calls, end = True, source.at
            yield from source.skip_blanks()
            if not (yield from take_any(source, (",",) if listed else (";", ","))) and listed:
                return True


@dataclass(frozen=True)
class NamedCalls(CallFormat):
    """An opening mark, the tool's name, another mark and the arguments; also reads Mistral's older format.

    Args:
        begin, middle: the marks before and after the name.
        older: the older format, which the same opening mark may introduce.
    """

    begin: str
    middle: str
    older: JsonCalls

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.middle)

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        choices = (f"{literal(tool.name)} {spell(self.middle)} {schema_of(tool)}" for tool in tools)
        calls = "\n".join(f"call_{i}: {choice}" for i, choice in enumerate(choices))
        more = f" ({spell(self.begin)} call)*" if parallel else ""
        return f"calls: call{more}\ncall: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n{calls}\n"

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(
            f"{self.begin}{tool}{self.middle}{json.dumps(given, ensure_ascii=False)}" for tool, given in calls
        )

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        start = source.at
        yield from source.take(self.begin)
        yield from source.skip_blanks()
        if (yield from source.peek()) in ("[", "{"):
            source.at = start
            return (yield from self.older.read(source, tools))
        name = yield from read_name(source)
        yield from source.skip_blanks()
        yield from source.take(self.middle)
        yield from source.skip_blanks()
        if not name or (yield from source.peek()) != "{":
            return False
        yield Called(name)
        yield from stream_value(source)
        return True


def read_name(source: Source) -> Reading[str]:
    """Read the letters, digits, ``_``, ``-`` and ``.`` that come next."""
    start = source.at
    while (character := (yield from source.peek())) and (character.isalnum() or character in "_-."):
        source.at += 1
    return source.text[start : source.at]


def take_after_blanks(source: Source, mark: str) -> Reading[bool]:
    """Read blanks and the mark after them; read nothing if the mark is missing."""
    start = source.at
    yield from source.skip_blanks()
    if mark and (yield from source.take(mark)):
        return True
    source.at = start
    return False


def take_any(source: Source, texts: Sequence[str]) -> Reading[str]:
    """Read whichever of ``texts`` comes next; empty if none does."""
    for each in texts:
        if (yield from source.take(each)):
            return each
    return ""


def read_object(source: Source) -> Reading[bool]:
    """Read one call, yielding its arguments as they come once its name is known.

    False if there is none; then no event was yielded.
    """
    if not (yield from source.take("{")):
        return False
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    called, more = False, True
    while more:
        key = yield from read_key(source)
        if key is None:
            return called
        if key in NAMES and name is None:
            name = yield from read_string(source)
            if name is None:
                return False
        elif key in ARGUMENTS and name is not None and not called:
            called = True
            yield Called(name)
            yield from read_arguments(source)
        else:
            value = yield from read_value(source)
            if value is None:
                return called
            early = value if key in ARGUMENTS else early
        yield from source.skip_blanks()
        more = yield from source.take(",")
    if (yield from source.take("}")) and name is not None and not called:
        called = True
        yield Called(name)
        yield Arguments(_object_text(early))
    return called


def read_key(source: Source) -> Reading[str | None]:
    """Read a key and its colon, with blanks around them; None if there is none."""
    yield from source.skip_blanks()
    key = yield from read_string(source)
    yield from source.skip_blanks()
    if key is None or not (yield from source.take(":")):
        return None
    yield from source.skip_blanks()
    return key


def read_arguments(source: Source) -> Reading[None]:
    """Yield the arguments that begin here: an object unchanged, a string decoded, nothing as ``{}``."""
    if not (yield from stream_value(source)):
        value = yield from read_value(source)
        if value is not None:
            yield Arguments(_object_text(value))


def _object_text(value: str | None) -> str:
    decoded = None if value is None else json.loads(value, strict=False)
    return decoded if isinstance(decoded, str) else "{}" if decoded is None else value or "{}"
