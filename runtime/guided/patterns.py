"""Bounds on regular expressions; rewrite JSON Schema's patterns (ECMA-262) for the grammar library."""

import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from llmc.errors import GrammarError, require

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST_REGEX = 16 * 1024
"""Most characters of a regular expression; longer ones take minutes before a limit of the library stops them."""
ESCAPES = '"\\bfnrt'
"""Characters that JSON text may escape with a backslash; no other character is escaped."""
MOST_REPETITIONS = LONGEST_REGEX
"""Largest product of nested repetitions: ``a{20000}`` costs as much as 20,000 written characters."""
# An unclosed class reaches to the end: searching again from every bracket would take quadratic time.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{([0-9]*)(,?)([0-9]*)\}|.", re.DOTALL)
UNNAMED_CONTROLS = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
r"""Control characters that JSON can only write as ``\u00XX``."""
_WRITTEN = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"  # all others, in the library's notation
_NAMED = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,8})\}|c([A-Za-z])")
_PROPERTY = re.compile(r"[pP](?:\{[^{}]*\}|[A-Za-z])")
_GROUP = re.compile(r"\(\?(?:P?<(?![=!])[^>]*>|([A-Za-z-]+)[:)])")
# Flags that change how the text is read: blanks and comments, bytes for characters, line ends.
_UNREADABLE_FLAGS = frozenset("xuR")
# https://262.ecma-international.org/15.0/#sec-runtime-semantics-compilecharacterclass
_SETS = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}


def check_regex(regex: str, parameter: str, where: str = "") -> None:
    """Refuse a regular expression that is too long or repeats too much.
    Raises GrammarError: about ``parameter``, with ``where`` before the problem."""
    if len(regex) > LONGEST_REGEX:
        raise GrammarError(parameter, f"{where}has {len(regex)} characters, expected at most {LONGEST_REGEX}")
    largest = repetitions(regex)
    if largest > MOST_REPETITIONS:
        raise GrammarError(parameter, f"{where}repeats something {largest} times, expected at most {MOST_REPETITIONS}")


def repetitions(regex: str) -> int:
    """The largest product of nested counts, such as 6 in ``(a{2}b){0,3}``; ``{m,}`` counts as m."""
    groups = [1]  # per open group: the largest product in it so far
    last, most = 1, 1
    for piece in _PIECE.finditer(regex):
        text = piece[0]
        if text == "(":
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif text[0] == "{" and len(text) > 1:
            last *= max(1, _number(piece[1]), _number(piece[3]))
            groups[-1] = max(groups[-1], last)
        else:
            last = 1
        most = max(most, last)
    return most


def _number(digits: str) -> int:
    return int(digits[:20] or "0")  # more digits exceed every bound and are slow to read


def library_pattern(text: str, where: str) -> str:
    r"""Rewrite a pattern of the schema at ``where`` so that the library enforces it inside a JSON string.

    If a class holds all control characters, the library lets it match every escape, even ``\"`` and ``\\`` when the
    class lacks the quote and the backslash. So classes lose the characters that JSON only writes as ``\u00XX``; no
    output holds those. Group names go, too, because the library gives one of them its own meaning.

    Raises:
        GrammarError: the pattern cannot be read, or names such a character outside a class.
    """
    return "".join(_Reader(text, where).parts())


def _match_bytes(schema: dict[str, Any]) -> "LLMatcher":
    library = require("llguidance", "guided")
    grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides={"json_allowed_escapes": ESCAPES})
    matcher: LLMatcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    return matcher


def check_patterns(patterns: Collection[str], where: str) -> None:
    """Refuse patterns of the schema at ``where`` that the library does not know, or two that match the same text.
    Raises GrammarError: naming the path."""
    error = _match_bytes({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}).get_error()
    if error:
        raise GrammarError(
            "json_schema", f"has the keyword 'patternProperties' at {where}, which cannot be enforced: {error:.300}"
        )


def list_matches(pattern: str, names: Collection[str]) -> list[str] | None:
    """The ``names`` that a pattern of :func:`library_pattern` allows; None if it also allows other names."""
    waiting = [(b"", _match_bytes({"type": "string", "pattern": pattern}))]
    if "Unsatisfiable" in waiting[0][1].get_error():
        return []
    written = {json.dumps(name, ensure_ascii=False).encode(): name for name in names}
    following: dict[bytes, set[int]] = {}
    for text in written:
        for end in range(len(text)):
            following.setdefault(text[:end], set()).add(text[end])
    matches = []
    while waiting:
        text, matcher = waiting.pop()
        if text in written:
            matches.append(written[text])
            continue
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = {byte for byte in range(256) if bits >> byte & 1}
        if matcher.is_error() or not allowed <= following.get(text, set()):
            return None
        for byte in allowed:
            after = matcher.deep_copy()
            after.consume_token(byte)
            waiting.append((text + bytes([byte]), after))
    return matches


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self._where = where
        self._at = 0

    def parts(self) -> Iterator[str]:
        while self._at < len(self.text):
            yield self._part()

    def _part(self) -> str:
        character = self.text[self._at]
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character == "(" and (group := _GROUP.match(self.text, self._at)):
            if _UNREADABLE_FLAGS.intersection(group[1] or ""):
                raise self._error(f"has the flags {group[1]!r}; write the pattern without them")
            self._at = group.end()
            return group[0] if group[1] else "("
        self._at += 1
        return self._literal(character) if UNNAMED_CONTROLS.match(character) else character

    def _escape(self) -> str:
        self._at += 1
        name = self.text[self._at : self._at + 1]
        if members := None if name.lower() in ("d", "w") else self._set():
            return f"[[{members}]&&{_WRITTEN}]"
        # The library knows these classes and adds no non-ASCII characters; it refuses anchors and references.
        if name.isalnum() and name in "dDwWbBAzk123456789":
            self._at += 1
            return f"\\{name}"
        return self._literal(self._character())

    def _literal(self, character: str) -> str:
        if UNNAMED_CONTROLS.match(character):
            raise self._error("names a control character that JSON writes as \\u00XX only")
        return _escape(character)

    def _set(self) -> str | None:
        r"""The members of a class written as an escape here, such as ``\s``; None if there is none."""
        name = self.text[self._at : self._at + 1]
        if property_class := _PROPERTY.match(self.text, self._at):
            self._at = property_class.end()
            return f"\\{property_class[0]}"
        if not name or name.lower() not in _SETS:
            return None
        self._at += 1
        return _SETS[name] if name.islower() else f"[^{_SETS[name.lower()]}]"

    def _character(self) -> str:
        if escape := _HEX.match(self.text, self._at):
            self._at = escape.end()
            if escape[4]:
                return chr(ord(escape[4]) % 32)
            code = int(next(filter(None, escape.groups())), 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"names \\{escape[0]}, which is not a character")
            return chr(code)
        name = self.text[self._at : self._at + 1]
        if name not in _NAMED and (not name or name.isalnum()):
            raise self._error(f"has the escape \\{name}, which ECMA-262 does not know")
        self._at += 1
        return _NAMED.get(name, name)

    def _class(self) -> str:
        self._at += 1
        negated = self.text.startswith("^", self._at)
        self._at += negated
        if self.text.startswith("]", self._at):
            raise self._error("has an empty class")
        members = []
        while not self.text.startswith("]", self._at):
            members.append(self._member())
        self._at += 1
        written = f"[{'^' * negated}{''.join(members)}]"
        return f"[{written}&&{_WRITTEN}]"

    def _member(self) -> str:
        first = self._class_atom()
        if len(first) > 1:
            return f"[{first}]"
        last, before = first, self._at
        if self.text.startswith("-", self._at) and not self.text.startswith("-]", self._at):
            self._at += 1
            last = self._class_atom()
            if len(last) > 1:  # as in [+-\d]: the dash itself
                last, self._at = first, before
        if first > last:
            raise self._error(f"has the range {first}-{last}, which is empty")
        return _escape(first) if first == last else f"{_escape(first)}-{_escape(last)}"

    def _class_atom(self) -> str:
        """A single character, or the members of a class as a longer text."""
        if self._at >= len(self.text):
            raise self._error("has a class without an end")
        character = self.text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if members := self._set():
            return members
        if self.text.startswith("b", self._at):
            self._at += 1
            return "\b"
        return self._character()

    def _error(self, reason: str) -> GrammarError:
        return GrammarError("json_schema", f"has a pattern at {self._where} that cannot be enforced: it {reason}")


def _escape(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"
