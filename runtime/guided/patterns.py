"""Bounds of regular expressions; JSON Schema's patterns as the grammar library enforces them, in ECMA-262's meaning."""

import re

from llmc.errors import GrammarError

LONGEST_REGEX = 16 * 1024
"""Characters of a regular expression at most; longer ones cost minutes before a limit of the library stops them."""
MOST_REPETITIONS = LONGEST_REGEX
"""Nested repetitions multiply to no more: ``a{20000}`` costs as much as its characters written out would."""
# A class that nobody closes reaches to the end: looked for again from every bracket, it would cost a square.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{([0-9]*)(,?)([0-9]*)\}|.", re.DOTALL)
UNNAMED_CONTROLS = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
r"""Control characters that JSON can only write as ``\u00XX``."""
_NAMED = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,8})\}|c([A-Za-z])")
_PROPERTY = re.compile(r"[pP](?:\{[^{}]*\}|[A-Za-z])")
_GROUP = re.compile(r"\(\?(?:P?<(?![=!])[^>]*>|([A-Za-z-]+)[:)])")
# Flags that change how the text is to be read: blanks and comments, bytes for characters, line ends.
_UNREADABLE_FLAGS = frozenset("xuR")
# https://262.ecma-international.org/15.0/#sec-runtime-semantics-compilecharacterclass
_SETS = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}


def check_regex(regex: str, name: str) -> None:
    """Refuse a regular expression that is too long, or repeats too much.

    Raises:
        GrammarError: beginning with ``name``.
    """
    if len(regex) > LONGEST_REGEX:
        raise GrammarError(f"{name} has {len(regex)} characters, expected at most {LONGEST_REGEX}")
    found = repetitions(regex)
    if found > MOST_REPETITIONS:
        raise GrammarError(f"{name} repeats something {found} times, expected at most {MOST_REPETITIONS}")


def repetitions(regex: str) -> int:
    """The largest product of nested counts, such as 6 of ``(a{2}b){0,3}``; of ``{m,}`` it is m that counts."""
    groups = [1]  # of each group that is open: the largest in it so far
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
    return int(digits[:20] or "0")  # more digits are far above every bound, and slow to read


class Pattern:
    r"""A pattern of a schema, spelt so that the library enforces it inside of a JSON string.

    The library lets a class that holds all control characters match every escape, ``\"`` and ``\\`` among them, whether
    the class holds the quote and the backslash or not. So no class keeps all of them: without escapes ``\u00XX``, all
    that need one are left out; with them, one that the pattern does not name. Names of groups go, too, for the library
    gives one a meaning of its own.

    Args:
        text: as in the schema.
        where: the path of the schema, for messages.

    Raises:
        GrammarError: the pattern cannot be read.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self._where = where
        self._at = 0
        self.controls: set[str] = set()
        """Characters of :data:`UNNAMED_CONTROLS` that it names, in classes or outside of them."""
        self.must_escape = False
        """True if one of them stands outside of a class, so that an output may need its escape."""
        self._parts: list[tuple[str, bool]] = []  # text, and whether control characters are to be taken out of it
        while self._at < len(text):
            self._parts.append(self._part())

    def write(self, escapes: bool) -> str:
        r"""The pattern for the library, where strings have escapes ``\u00XX`` or have none.

        Raises:
            GrammarError: with escapes, if it names every control character.
        """
        left_out = UNNAMED_CONTROLS.pattern[1:-1]
        if escapes:
            unnamed = [chr(code) for code in range(0x20) if UNNAMED_CONTROLS.match(chr(code))]
            spare = [character for character in unnamed if character not in self.controls]
            if not spare:
                raise self._error("names every control character")
            left_out = spare[-1]
        left_out = re.sub("[\x00-\x1f\x7f]", lambda match: _escaped(match[0]), left_out)
        return "".join(f"[{part}&&[^{left_out}]]" if controls else part for part, controls in self._parts)

    def _part(self) -> tuple[str, bool]:
        character = self.text[self._at]
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character == "(" and (group := _GROUP.match(self.text, self._at)):
            if _UNREADABLE_FLAGS.intersection(group[1] or ""):
                raise self._error(f"has the flags {group[1]!r}; write the pattern without them")
            self._at = group.end()
            return (group[0] if group[1] else "("), False
        self._at += 1
        return self._literal(character) if UNNAMED_CONTROLS.match(character) else character, False

    def _escape(self) -> tuple[str, bool]:
        self._at += 1
        name = self.text[self._at : self._at + 1]
        if name.lower() in ("d", "w"):  # the library knows these, and adds what is not ASCII to neither
            self._at += 1
            return f"\\{name}", False
        if found := self._set():
            return f"[{found}]", True
        if name.isalnum() and name in "bBAzk123456789":  # anchors and references, which the library refuses or knows
            self._at += 1
            return f"\\{name}", False
        return self._literal(self._character()), False

    def _literal(self, character: str) -> str:
        if UNNAMED_CONTROLS.match(character):
            self.controls.add(character)
            self.must_escape = True
        return _escaped(character)

    def _set(self) -> str | None:
        r"""The members of a class that is written as an escape at the current place, such as ``\s``."""
        name = self.text[self._at : self._at + 1]
        if found := _PROPERTY.match(self.text, self._at):
            self._at = found.end()
            return f"\\{found[0]}"
        if not name or name.lower() not in _SETS:
            return None
        self._at += 1
        return _SETS[name] if name.islower() else f"[^{_SETS[name.lower()]}]"

    def _character(self) -> str:
        """The character that is written as an escape at the current place."""
        if found := _HEX.match(self.text, self._at):
            self._at = found.end()
            if found[4]:
                return chr(ord(found[4]) % 32)
            code = int(next(filter(None, found.groups())), 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"names \\{found[0]}, which is no character")
            return chr(code)
        name = self.text[self._at : self._at + 1]
        if name not in _NAMED and (not name or name.isalnum()):
            raise self._error(f"has the escape \\{name}, which ECMA-262 does not know")
        self._at += 1
        return _NAMED.get(name, name)

    def _class(self) -> tuple[str, bool]:
        self._at += 1
        negated = self.text.startswith("^", self._at)
        self._at += negated
        if self.text.startswith("]", self._at):
            raise self._error("has an empty class")
        members = []
        while not self.text.startswith("]", self._at):
            members.append(self._member())
        self._at += 1
        text = f"[{'^' * negated}{''.join(text for text, _ in members)}]"
        return text, negated or any(holds for _, holds in members)

    def _member(self) -> tuple[str, bool]:
        """One member of a class for the library, and whether it may hold control characters."""
        first = self._class_atom()
        if len(first) > 1:
            return f"[{first}]", True
        last, before = first, self._at
        if self.text.startswith("-", self._at) and not self.text.startswith("-]", self._at):
            self._at += 1
            last = self._class_atom()
            if len(last) > 1:  # as in [+-\d]: the dash itself
                last, self._at = first, before
        if first > last:
            raise self._error(f"has the range {first}-{last}, which is empty")
        self.controls.update(character for character in (first, last) if UNNAMED_CONTROLS.match(character))
        text = _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        return text, first < " " or first <= "\x7f" <= last

    def _class_atom(self) -> str:
        """A single character, or the longer text of a set of them."""
        if self._at >= len(self.text):
            raise self._error("has a class without an end")
        character = self.text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if found := self._set():
            return found
        if self.text.startswith("b", self._at):
            self._at += 1
            return "\b"
        return self._character()

    def _error(self, reason: str) -> GrammarError:
        return GrammarError(f"json_schema: the pattern at {self._where} cannot be enforced: it {reason}")


def _escaped(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"
