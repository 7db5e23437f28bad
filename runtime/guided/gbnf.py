"""llama.cpp's grammars, read into rules and written in llguidance's dialect of Lark.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Beyond it, a minus sign may be escaped.
What stands for tokens (``<name>``, ``<[17]>``) is refused, and so are a class without members and ``{,2}``.

Lark's lexer takes the longest lexeme and never looks back: with ``("b" | "bc") "c"`` as two lexemes, it misses ``bc``.
So a grammar without recursion becomes a single lexeme, which has exactly its texts. In others the largest parts without
recursion are lexemes: every output is one of the grammar's, but one that needs a shorter lexeme is not found.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from llmc.errors import GrammarError
from llmc.runtime.guided.patterns import MOST_REPETITIONS

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


def _list_children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence | Choice):
        return node.parts
    return (node.part,) if isinstance(node, Repetition) else ()


def _references(node: Node) -> set[str]:
    return {node.name} if isinstance(node, Reference) else set().union(*map(_references, _list_children(node)))


def to_lark(grammar: str) -> str:
    """A grammar in llguidance's notation; GrammarError says what was expected where, or why it is refused."""
    rules = _Reader(grammar).rules()
    missing = {"root"}.union(*map(_references, rules.values())) - rules.keys()
    if missing:
        raise GrammarError(
            "grammar", f"has no rule {min(missing)!r}", "define it, or correct its name ('root' is the output)"
        )
    used = _reachable(rules)
    if "root" not in _find_names(used, _ends):
        raise GrammarError("grammar", "allows no text: all that 'root' derives goes on without an end")
    flat = _find_names(used, _names_only)
    _check_repetitions(used, flat)
    return "\n".join(_Text(used, flat).lines) + "\n"


def _reachable(rules: Mapping[str, Node]) -> dict[str, Node]:
    found, waiting = {"root": rules["root"]}, ["root"]
    while waiting:
        for name in _references(rules[waiting.pop()]) - found.keys():
            found[name] = rules[name]
            waiting.append(name)
    return found


def _find_names(rules: Mapping[str, Node], holds: Callable[[Node, Container[str]], bool]) -> dict[str, None]:
    """The smallest set of rules of which ``holds`` is true, given that set; each after those that it needs."""
    found: dict[str, None] = {}
    before = -1
    while before < len(found):
        before = len(found)
        for name in (*rules, *list(rules)[::-1]):
            if name not in found and holds(rules[name], found):
                found[name] = None
    return found


def _names_only(node: Node, names: Container[str]) -> bool:
    return all(name in names for name in _references(node))


def _ends(node: Node, ending: Container[str]) -> bool:
    return isinstance(node, Characters) or _derives(node, ending, _ends)


def _may_be_empty(node: Node, empty: Container[str]) -> bool:
    return node.lark == '""' if isinstance(node, Characters) else _derives(node, empty, _may_be_empty)


def _derives(node: Node, names: Container[str], holds: Callable[[Node, Container[str]], bool]) -> bool:
    if isinstance(node, Reference):
        return node.name in names
    if isinstance(node, Repetition) and (node.least == 0 or node.most == 0):
        return True
    return (any if isinstance(node, Choice) else all)(holds(part, names) for part in _list_children(node))


def _check_repetitions(rules: Mapping[str, Node], flat: Iterable[str]) -> None:
    largest: dict[str, int] = {}

    def of(node: Node) -> int:
        if isinstance(node, Reference):
            return largest.get(node.name, 1)
        below = max(map(of, _list_children(node)), default=1)
        return below * max(1, node.least, node.most or 0) if isinstance(node, Repetition) else below

    for name in (*flat, *rules):
        largest[name] = max(largest.get(name, 1), of(rules[name]))
        if largest[name] > MOST_REPETITIONS:
            raise GrammarError(
                "grammar",
                f"repeats something in the rule {name!r} {largest[name]} times, expected at most {MOST_REPETITIONS}",
            )


def _is_word(node: Node) -> bool:
    """True for some characters one after the other, of which a grammar may have thousands side by side."""
    return isinstance(node, Characters) or (isinstance(node, Sequence) and all(map(_is_word, node.parts)))


class _Text:
    """Rules in Lark's notation: parts without recursion are terminals, in capitals."""

    def __init__(self, rules: Mapping[str, Node], flat: Container[str]) -> None:
        self._rules, self._flat = rules, flat
        self._empty = _find_names(rules, _may_be_empty)
        self._names = {name: f"r{number}" for number, name in enumerate(rules) if name not in flat}
        self._terminals: dict[str | Node, str] = {}
        self._waiting: deque[tuple[str, Node]] = deque()
        self.lines = [f"start: {self._of(Reference('root'))}"]
        self.lines += [f"{label}: {self._of(rules[name])}" for name, label in self._names.items()]
        while self._waiting:
            label, node = self._waiting.popleft()
            self.lines.append(f"{label}: {self._of(node, True)}")

    def _of(self, node: Node, terminal: bool = False) -> str:
        if not terminal and _names_only(node, self._flat):
            label = self._terminal(node)
            return f"({label})?" if _may_be_empty(node, self._empty) else label
        if isinstance(node, Characters):
            return node.lark
        if isinstance(node, Reference):
            return self._terminal(node) if terminal else self._names[node.name]
        if isinstance(node, Sequence):
            return " ".join(self._of(part, terminal) for part in node.parts) or '""'
        if isinstance(node, Repetition):
            return self._repetition(node, terminal)
        return f"({' | '.join(self._of(part, terminal) for part in self._options(_list_children(node), terminal))})"

    def _terminal(self, node: Node) -> str:
        key = node.lark if isinstance(node, Characters) else node.name if isinstance(node, Reference) else node
        if key not in self._terminals:
            self._terminals[key] = f"T{len(self._terminals)}"
            self._waiting.append(
                (self._terminals[key], self._rules[node.name] if isinstance(node, Reference) else node)
            )
        return self._terminals[key]

    def _options(self, parts: tuple[Node, ...], terminal: bool) -> tuple[Node, ...]:
        """The parts of a choice, words as one beside parts with recursion."""
        words = () if terminal else tuple(filter(_is_word, parts))
        return (Choice(words), *(part for part in parts if not _is_word(part))) if words else parts

    def _repetition(self, node: Repetition, terminal: bool) -> str:
        if node.most == 0:
            return '""'
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        counts = bounds.get((node.least, node.most)) or f"{{{node.least},{'' if node.most is None else node.most}}}"
        return f"({self._of(node.part, terminal)}){counts}"


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
        return GrammarError("grammar", f"has {found} at line {line}, column {column}, expected {expected}")
