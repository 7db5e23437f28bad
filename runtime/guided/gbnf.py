"""llama.cpp's grammars, read into rules.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Beyond it, a minus sign may be escaped.
What stands for tokens (``<name>``, ``<[17]>``) is refused, and so are a class without members and ``{,2}``.
"""

import json
import re
from dataclasses import dataclass

from llmc.errors import GrammarError

# A rule's name and ::= at the start of a line: no grammar in Lark's notation has that.
_RULE = re.compile(r"^[ \t]*[-\w]+[ \t]*::=", re.MULTILINE)
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
_NAME = re.compile(r"[-A-Za-z0-9_]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
_ESCAPE = re.compile(r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt"\\\[\]-]))')
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = re.compile(".", re.DOTALL)
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
# The reader recurses over parentheses; nobody nests as many.
_DEEPEST = 100
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF


class Node:
    """A part of a rule, of one of the kinds that follow."""


@dataclass(frozen=True, eq=False)
class Characters(Node):
    """A text, or one character of a set, in Lark's notation."""

    lark: str


@dataclass(frozen=True, eq=False)
class Reference(Node):
    """A text of another rule."""

    name: str


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    """Parts one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """One of several parts, of which there is at least one."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repetition(Node):
    """A part so many times; ``most`` is None where there is no bound."""

    part: Node
    least: int
    most: int | None


def is_gbnf(grammar: str) -> bool:
    """True for llama.cpp's notation, False for llguidance's dialect of Lark."""
    return _RULE.search(grammar) is not None or _LARK.search(grammar) is None


def read_gbnf(grammar: str) -> dict[str, Node]:
    """The rules by their names, ``root`` for the whole output; GrammarError says what was expected where."""
    rules = _Reader(grammar).rules()
    missing = {"root"}.union(*map(references, rules.values())) - rules.keys()
    if missing:
        raise GrammarError(f"grammar: No {min(missing)!r} rule; define it or correct its name ('root' is the output)")
    return rules


def children(node: Node) -> tuple[Node, ...]:
    """The parts of a node, one level down."""
    if isinstance(node, Sequence | Choice):
        return node.parts
    return (node.part,) if isinstance(node, Repetition) else ()


def references(node: Node) -> set[str]:
    """Names of the rules that a node names."""
    return {node.name} if isinstance(node, Reference) else set().union(*map(references, children(node)))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANK_LINES)
            if name in found:
                raise self._error(f"a rule that is defined once, {name!r} is already")
            found[name] = self._choice(_BLANKS)
            if self._sign() not in ("", "\r", "\n"):
                raise self._error("the end of the line, or one of | * + ? { and what a rule consists of")
            self._skip(_BLANK_LINES)
        return found

    def _choice(self, blanks: re.Pattern[str]) -> Node:
        parts = [self._sequence(blanks)]
        while self._takes("|"):
            self._skip(_BLANK_LINES)
            parts.append(self._sequence(blanks))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, blanks: re.Pattern[str]) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(blanks)
            while (counts := self._counts()) is not None:
                part = Repetition(part, *counts)
                self._skip(blanks)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node | None:
        if self._takes('"'):
            return self._literal()
        if self._takes("["):
            return self._class()
        if self._takes("("):
            return self._group()
        if self._takes("."):
            return Characters("/(?s:.)/")
        if self._sign() in ("<", "!"):
            raise self._error("characters, for tokens (<name>, <[17]>, !<name>) are not supported")
        name = _NAME.match(self._text, self._at)
        return Reference(self._match(_NAME, "")[0]) if name else None

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"at most {_DEEPEST} parentheses in each other")
        self._skip(_BLANK_LINES)
        found = self._choice(_BLANK_LINES)
        self._expect(")")
        self._depth -= 1
        return found

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in _SIGNS.items():
            if self._takes(sign):
                return counts
        if self._sign() != "{":
            return None
        found = self._match(_COUNTS, "{2}, {2,} or {2,3}, with the smaller number first")
        least = int(found[1])
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise self._error(f"at least as many as the {least} in {found[0]!r} before it")
        return least, most

    def _literal(self) -> Node:
        text = ""
        while not self._takes('"'):
            text += chr(self._character("a quote that ends the text"))
        return Characters(json.dumps(text))

    def _class(self) -> Node:
        negated = self._takes("^")
        members = []
        while not self._takes("]"):
            first = last = self._character("] that ends the class")
            if not self._text.startswith("-]", self._at) and self._takes("-"):
                last = self._character("the end of a range")
                if last < first:
                    raise self._error(f"a range that does not end below its start, U+{first:04X}")
            members.append(f"\\x{{{first:x}}}-\\x{{{last:x}}}")
        if not members:
            raise self._error("a member of the class")
        return Characters(f"/[{'^' * negated}{''.join(members)}]/")

    def _character(self, expected: str) -> int:
        if self._sign() != "\\":
            return ord(self._match(_ANY, expected)[0])
        before = self._at
        found = self._match(_ESCAPE, r"one of the escapes \n \r \t \" \\ \[ \] \- \xHH \uHHHH \UHHHHHHHH")
        if found[4]:
            return ord(_SHORT.get(found[4], found[4]))
        code = int(found[1] or found[2] or found[3], 16)
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            self._at = before
            raise self._error(f"a character, which {found[0]} is not")
        return code

    def _sign(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, sign: str) -> bool:
        found = self._sign() == sign
        self._at += found
        return found

    def _skip(self, blanks: re.Pattern[str]) -> None:
        self._match(blanks, "")  # it matches the empty text

    def _match(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(expected)
        self._at = found.end()
        return found

    def _expect(self, sign: str) -> None:
        self._match(re.compile(re.escape(sign)), sign)

    def _error(self, expected: str) -> GrammarError:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        found = repr(self._text[self._at : self._at + 10]) if self._at < len(self._text) else "the end"
        return GrammarError(f"grammar: line {line}, column {column}: found {found}, expected {expected}")
