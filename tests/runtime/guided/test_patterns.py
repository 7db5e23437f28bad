"""JSON Schema's patterns: classes against their members, escapes of control characters, ECMA-262's notation."""

import json
import re
from random import Random
from typing import Any

import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.json_schema import enforceable
from llmc.runtime.guided.patterns import Pattern, repetitions

SINGLE = '"\\/\n\r\t\b\f\x00\x01\x1f !#[]^-&~azAZ09_é\u2028\ufeff🎉\x7f'
SETS = {
    r"\d": lambda c: c in "0123456789",
    r"\D": lambda c: c not in "0123456789",
    r"\w": lambda c: c.isascii() and (c.isalnum() or c == "_"),
    r"\W": lambda c: not (c.isascii() and (c.isalnum() or c == "_")),
    r"\s": lambda c: c in "\t\n\x0b\x0c\r \u2028\ufeff",
    r"\S": lambda c: c not in "\t\n\x0b\x0c\r \u2028\ufeff",
    r"\p{Cc}": lambda c: c < " " or c == "\x7f",
    r"\P{L}": lambda c: not c.isalpha(),
}


def random_class(random: Random) -> tuple[str, Any]:
    """A class as written, and the function that tells whether a character belongs to it."""
    texts, holds = [], []
    for _ in range(random.randint(1, 3)):
        kind = random.random()
        if kind < 0.25:
            text = random.choice(list(SETS))
            texts.append(text)
            holds.append(SETS[text])
        elif kind < 0.7:
            first, last = sorted(random.choices(SINGLE, k=2))
            texts.append(f"{spelt(first, random)}-{spelt(last, random)}")
            holds.append(lambda c, first=first, last=last: first <= c <= last)
        else:
            single = random.choice(SINGLE)
            texts.append(spelt(single, random))
            holds.append(lambda c, single=single: c == single)
    negated = random.random() < 0.5
    return f"[{'^' * negated}{''.join(texts)}]", lambda c: any(hold(c) for hold in holds) != negated


def spelt(character: str, random: Random) -> str:
    if character in "\\]^-" or random.random() < 0.3:
        return f"\\u{{{ord(character):x}}}" if random.random() < 0.5 or character.isalnum() else f"\\{character}"
    return character


class TestClasses:
    @pytest.mark.parametrize("pattern", ['^[^"]{3}$', r"^[^\\]{3}$", "^[^ -~]{3}$", r"^[\x00-\x21]{3}$"])
    def test_let_no_quote_through_that_they_leave_out(self, byte_level: Any, pattern: str) -> None:
        texts = byte_level.outputs(walks=6, json_schema={"type": "string", "pattern": pattern})
        assert all(re.fullmatch(pattern, json.loads(text)) for text in texts)

    @pytest.mark.parametrize("seed", range(40))
    def test_take_their_members_and_no_other(self, byte_level: Any, seed: int) -> None:
        written, holds = random_class(Random(seed))
        schema = {"type": "string", "pattern": f"^{written}$"}
        pattern = Pattern(written, "#")
        _, escapes = enforceable(schema)
        unwritten = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
        members = [c for c in SINGLE if holds(c) and (escapes or not unwritten.match(c))]
        try:
            byte_level.start(json_schema=schema)
        except GrammarError:
            assert not [c for c in members if c in pattern.controls or not unwritten.match(c)]
            return
        for character in SINGLE:
            # json.dumps writes U+007F as it is, which the library does not.
            text = json.dumps(character, ensure_ascii=False).replace("\x7f", r"\u007f")
            read = byte_level.reads(byte_level.start(json_schema=schema), text)
            assert not read or holds(character), (written, character)
            # Of the control characters that have no short escape, one may be missing.
            assert read or not holds(character) or unwritten.match(character), (written, character)

    def test_are_read_as_ecma_262_reads_them(self, byte_level: Any) -> None:
        schema = {"type": "string", "pattern": r"^[[:alpha:]][a&&b~~c]\cJ[\b]\/(?<n>\u{1F389})$"}
        assert byte_level.reads(byte_level.start(json_schema=schema), r'":]&\n\b/🎉"')
        assert not byte_level.reads(byte_level.start(json_schema=schema), r'"x]&\n\b/🎉"')


class TestControlCharacters:
    @pytest.mark.parametrize(
        "schema",
        [
            {"enum": ["a\x01b", "a\x7fb"]},
            {"const": ["a\x01b", {"k": "a\x7fb"}]},
            {"type": "string", "pattern": r"^a(\x01|\u007f)b$"},
            {"type": "string", "pattern": "^a[\x01\x7f]b$"},
            {
                "type": "object",
                "properties": {"k": {"const": "a\x01b"}},
                "required": ["k"],
                "additionalProperties": False,
            },
        ],
        ids=str,
    )
    def test_are_written_as_escapes(self, byte_level: Any, schema: dict[str, Any]) -> None:
        for text in byte_level.outputs(walks=3, json_schema=schema):
            assert json.loads(text) == schema.get("const", json.loads(text))
            assert re.search(r"a\\u00(01|7[fF])b", text)

    @pytest.mark.parametrize("value", [{"const": "\x01"}, {"enum": [["\x7f"]]}, {"type": "string", "pattern": "\x01"}])
    def test_are_refused_where_a_name_could_be_spelt_twice(self, byte_level: Any, value: dict[str, Any]) -> None:
        with pytest.raises(GrammarError, match=r"holds a control character .* additionalProperties"):
            byte_level.ask(json_schema={"properties": {"a": value}})

    def test_never_give_a_name_a_second_spelling(self, byte_level: Any) -> None:
        schema = {"properties": {"a": {"const": 1}}, "additionalProperties": False, "required": ["a"]}
        guide = byte_level.start(json_schema={**schema, "type": "object", "properties": {"a": {"const": "\x01"}}})
        for token in byte_level.spell(b'{"'):
            guide.accept(token)
        assert {(byte_level.spellings[token] or b"")[:1] for token in byte_level.allowed(guide)} == {b"a"}


REFUSED = [
    ("[]", "empty class"),
    ("[a", "class without an end"),
    ("[b-a]", "range b-a"),
    (r"\ud800", "no character"),
    (r"\y", r"escape \\y, which ECMA-262 does not know"),
    ("(?x)a # b", "flags 'x'"),
]


class TestRefusals:
    @pytest.mark.parametrize(("pattern", "message"), REFUSED)
    def test_say_what_cannot_be_read(self, byte_level: Any, pattern: str, message: str) -> None:
        with pytest.raises(GrammarError, match=f"the pattern at #/items cannot be enforced: it .*{message}"):
            byte_level.ask(json_schema={"type": "array", "items": {"type": "string", "pattern": pattern}})

    def test_come_where_every_control_character_is_named(self, byte_level: Any) -> None:
        pattern = "".join(f"\\x{code:02x}" for code in range(0x20))
        with pytest.raises(GrammarError, match="names every control character"):
            byte_level.ask(json_schema={"type": "string", "pattern": f"^{pattern}$"})


class TestRepetitions:
    @pytest.mark.parametrize(
        ("regex", "count"),
        [
            ("a+b*", 1),
            ("a{3}", 3),
            ("(a{2}b){0,3}", 6),
            ("(a{2}){3}|(b{5}c){4}", 20),
            (r"\{9}[(]{2}x{3,}", 3),
            ("((a{2}){3}){4}b{5}", 24),
            ("a{,7}", 7),
        ],
    )
    def test_multiply(self, regex: str, count: int) -> None:
        assert repetitions(regex) == count
