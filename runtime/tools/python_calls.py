"""Calls as Python writes them: ``name(key=value, other="text")``, in a list or on lines between two marks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import literal, parameters_of, value_of
from llmc.runtime.tools.json_calls import read_name, take_after_blanks
from llmc.runtime.tools.literals import Literals
from llmc.runtime.tools.source import Arguments, Called, Reading, Source

_LITERALS = Literals(('"', "'"), escapes=True)


@dataclass(frozen=True)
class PythonCalls(CallFormat):
    """Calls between two marks, or an answer that is only a list of calls, without marks.

    Args:
        begin, end: the marks; empty for a list.
        between: text between two calls.
    """

    begin: str
    end: str
    between: str

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,) if self.begin else ()

    @property
    def bare_starts(self) -> tuple[str, ...]:
        return () if self.begin else ("[",)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    # ------------------------------------------------------------------------------------------------------- grammar

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = [rule for i, tool in enumerate(tools) for rule in _rules(i, tool)]
        heads = [f"call: {_heads(tools, '')}", *rules]
        more = f" ({literal(self.between)} call)*" if parallel else ""
        if self.begin:
            return "\n".join([f'calls: "\\n" call{more} "\\n" {spell(self.end)}', *heads, ""])
        # The bracket and the name are one terminal: it competes with free text, and the longest match wins.
        return "\n".join([f'calls: first{more} "]"', f"first: {_heads(tools, '[')}", *heads, ""])

    def bare_grammar(self) -> str:
        return r"\[[A-Za-z0-9_.-]+\("

    def bare_heads(self, names: Iterable[str]) -> list[str]:
        return [] if self.begin else [f"[{name}(" for name in names]

    def may_be_bare(self, text: str) -> bool:
        """True: the reader waits for a name after the bracket."""
        return True

    # ------------------------------------------------------------------------------------------------------- reading

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        written = []
        for tool, given in calls:
            items = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
            written.append(f"{tool}({', '.join(items)})")
        joined = self.between.join(written)
        return f"{self.begin}\n{joined}\n{self.end}" if self.begin else f"[{joined}]"

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        yield from source.take(self.begin)
        listed = yield from take_after_blanks(source, "[")
        has_calls = False
        while True:
            yield from source.skip_blanks()
            start = source.at
            if not (yield from _read_call(source)):
                source.at = start
                break
            has_calls = True
            yield from take_after_blanks(source, ",")
        if has_calls and listed:
            yield from take_after_blanks(source, "]")
        if has_calls:
            yield from take_after_blanks(source, self.end)
        return has_calls


def _heads(tools: Sequence[Tool], before: str) -> str:
    heads = (f"{literal(f'{before}{tool.name}(')} first_{i}_0 {literal(')')}" for i, tool in enumerate(tools))
    return " | ".join(heads)


def _rules(index: int, tool: Tool) -> list[str]:
    """Rules for a call's parameters, in order, with commas between those present."""
    parameters = list(parameters_of(tool))
    rules = []
    for position, parameter in enumerate(parameters):
        name = f"{index}_{position}"
        first, more = f"first_{index}_{position + 1}", f"more_{index}_{position + 1}"
        rules.append(f"item_{name}: {literal(f'{parameter.name}=')} {value_of(parameter.schema)}")
        skipped = "" if parameter.required else f" | {first}"
        rules.append(f"first_{name}: item_{name} {more}{skipped}")
        item = f"{literal(', ')} item_{name}"
        rules.append(f"more_{name}: {item if parameter.required else f'({item})?'} {more}")
    last = len(parameters)
    return [*rules, f'first_{index}_{last}: ""', f'more_{index}_{last}: ""']


def _read_call(source: Source) -> Reading[bool]:
    name = yield from read_name(source)
    if not name or not (yield from source.take("(")):
        return False
    yield Called(name)
    yield Arguments("{")
    first = True
    while not (yield from take_after_blanks(source, ")")):
        yield from source.skip_blanks()
        key = yield from read_name(source)
        if not key or not (yield from take_after_blanks(source, "=")):
            return True
        yield from source.skip_blanks()
        yield Arguments(f"{'' if first else ', '}{json.dumps(key)}: ")
        if not (yield from _LITERALS.stream(source)):
            return True
        first = False
        yield from take_after_blanks(source, ",")
    yield Arguments("}")
    return True
