"""JSON Schema's patterns: classes against their members, escapes of control characters, ECMA-262's notation."""

import json
import re
from random import Random
from typing import Any

import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.patterns import repetitions

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
    def test_let_no_quote_through_that_they_leave_out(self, byte_level, pattern):
        texts = byte_level.outputs(walks=6, json_schema={"type": "string", "pattern": pattern})
        assert all(re.fullmatch(pattern, json.loads(text)) for text in texts)

    @pytest.mark.threat("schema-enforced")
    @pytest.mark.parametrize("seed", range(40))
    def test_take_their_members_and_no_other(self, byte_level, seed):
        written, holds = random_class(Random(seed))
        schema = {"type": "string", "pattern": f"^{written}$"}
        unwritten = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
        members = [c for c in SINGLE if holds(c) and not unwritten.match(c)]
        try:
            byte_level.start(json_schema=schema)
        except GrammarError:
            assert not members
            return
        for character in SINGLE:
            read = byte_level.reads(byte_level.start(json_schema=schema), json.dumps(character, ensure_ascii=False))
            assert read == (character in members), (written, character)

    def test_are_read_as_ecma_262_reads_them(self, byte_level):
        schema = {"type": "string", "pattern": r"^[[:alpha:]][a&&b~~c]\cJ[\b]\/(?<n>\u{1F389})$"}
        assert byte_level.reads(byte_level.start(json_schema=schema), r'":]&\n\b/🎉"')
        assert not byte_level.reads(byte_level.start(json_schema=schema), r'"x]&\n\b/🎉"')


@pytest.mark.parametrize(
    "schema", [{"const": "a\x01b"}, {"enum": [["a\x7fb"]]}, {"type": "string", "pattern": "^a(\x01|b)$"}]
)
def test_control_characters_without_a_short_escape_are_refused(byte_level, schema):
    with pytest.raises(GrammarError, match="a control character that JSON writes as"):
        byte_level.ask(json_schema=schema)


REFUSED = [
    ("[]", "empty class"),
    ("[a", "class without an end"),
    ("[b-a]", "range b-a"),
    (r"\ud800", "not a character"),
    (r"\y", r"escape \\y, which ECMA-262 does not know"),
    ("(?x)a # b", "flags 'x'"),
]


class TestRefusals:
    @pytest.mark.parametrize(("pattern", "message"), REFUSED)
    def test_say_what_cannot_be_read(self, byte_level, pattern, message):
        with pytest.raises(GrammarError, match=f"a pattern at #/items that cannot be enforced: it .*{message}"):
            byte_level.ask(json_schema={"type": "array", "items": {"type": "string", "pattern": pattern}})


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
    def test_multiply(self, regex, count):
        assert repetitions(regex) == count
