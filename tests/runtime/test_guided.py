"""Masks against brute force over the vocabulary, whole outputs against re, json and parsers written for the purpose."""

import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llmc.errors import GrammarError, MissingExtraError, UsageError
from llmc.runtime import guided
from llmc.runtime.guided import Grammars, Guide
from llmc.runtime.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "recipes/tiny/checkpoint"
PADDING = 13  # ids that the model has and the tokenizer has not; no multiple of 8
MOST_TOKENS = 600
# A stack below which the library's recursion over the deepest inputs overflows by far.
SMALL_STACK = 256 * 1024


@dataclass(frozen=True)
class Form:
    json_schema: Any = None
    regex: Any = None
    grammar: Any = None
    choice: Any = None


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    spellings: list[bytes | None]  # None: no text
    eos: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.spellings) + PADDING

    def grammars(self, eos: tuple[int, ...] | None = None) -> Grammars:
        return Grammars(self.tokenizer, self.size, self.eos if eos is None else eos)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.spellings[token] or b"?" for token in tokens).decode()

    def spell(self, text: str) -> list[int]:
        """Tokens of ``text``, the longest first: seldom those of the tokenizer."""
        rest, tokens = text.encode(), []
        while rest:
            fits = [token for token, spelling in enumerate(self.spellings) if spelling and rest.startswith(spelling)]
            tokens.append(max(fits, key=lambda token: len(self.spellings[token] or b"")))
            rest = rest[len(self.spellings[tokens[-1]] or b"") :]
        return tokens


def byte_level_spellings(folder: Path) -> list[bytes | None]:
    """The table of GPT-2 (https://github.com/openai/gpt-2/blob/master/src/encoder.py), written anew."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return spellings(folder, lambda token: bytes(table[character] for character in token))


def metaspace_spellings(folder: Path) -> list[bytes | None]:
    def spell(token: str) -> bytes:
        byte = re.fullmatch("<0x(..)>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    return spellings(folder, spell)


def spellings(folder: Path, spell: Callable[[str], bytes]) -> list[bytes | None]:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: None if token["special"] else token["content"].encode() for token in content["added_tokens"]}
    ordinary = {
        token_id: spell(token) for token, token_id in content["model"]["vocab"].items() if token_id not in added
    }
    found = {**ordinary, **added}
    return [found[token_id] for token_id in range(len(found))]


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    return Vocabulary(tokenizer, byte_level_spellings(byte_level_folder), (0, 1))


@pytest.fixture(scope="session")
def metaspace(metaspace_folder: Path) -> Vocabulary:
    return Vocabulary(Tokenizer.from_folder(metaspace_folder), metaspace_spellings(metaspace_folder), (2,))


@pytest.fixture(scope="session")
def tiny() -> Vocabulary:
    return Vocabulary(Tokenizer.from_folder(TINY), byte_level_spellings(TINY), (0, 2))


@pytest.fixture(params=["byte_level", "metaspace", "tiny"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found: Vocabulary = request.getfixturevalue(request.param)
    return found


def start(grammars: Grammars, **form: Any) -> Guide:
    guide = grammars.guide(Form(**form))
    assert guide is not None
    return guide


def allowed(guide: Guide, size: int) -> set[int]:
    return set(np.flatnonzero(np.isfinite(guide.mask(np.zeros(size, np.float32)))).tolist())


def agrees(vocabulary: Vocabulary, guide: Guide, expected: set[int]) -> bool:
    """Whether the mask allows what is expected, or, if all of that begins alike, just the forced token among it."""
    found, forced = allowed(guide, vocabulary.size), guide.forced()
    if not forced:
        return found == expected
    beginnings = {(vocabulary.spellings[token] or b"")[:1] for token in expected}
    return found == {forced[0]} and found <= expected and len(beginnings) == 1


def walk(vocabulary: Vocabulary, guide: Guide, seed: int, most: int = MOST_TOKENS) -> list[int]:
    """Tokens of the largest random logits under the mask, up to the end of the sequence."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    while not guide.finished and len(tokens) < most:
        token = int(guide.mask(random.normal(0, 3, vocabulary.size).astype(np.float32)).argmax())
        guide.accept(token)
        if token not in vocabulary.eos:
            tokens.append(token)
    return tokens


def outputs(vocabulary: Vocabulary, walks: int = 12, **form: Any) -> Iterator[str]:
    grammars = vocabulary.grammars()
    for seed in range(walks):
        guide = start(grammars, **form)
        tokens = walk(vocabulary, guide, seed)
        assert guide.finished
        text = vocabulary.text(tokens)
        # The decoder of Llama 2 drops one space at the start.
        assert vocabulary.tokenizer.decode(tokens) in (text, text.removeprefix(" "))
        yield text


# ------------------------------------------------------------------------------------------------------------ oracles


def validate(schema: Any, value: Any, root: Any) -> bool:
    """JSON Schema as far as the tests need it (https://json-schema.org/draft/2020-12/json-schema-validation)."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return validate(target, value, root)
    return all(check(schema, value, root) for name, check in CHECKS.items() if name in schema)


TYPES = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool}


def has_type(schema: Any, value: Any, root: Any) -> bool:
    if schema["type"] in ("integer", "number"):
        return isinstance(value, int if schema["type"] == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[schema["type"]])


def has_properties(schema: Any, value: Any, root: Any) -> bool:
    known = schema["properties"]
    others = schema.get("additionalProperties", True)
    return isinstance(value, dict) and all(validate(known.get(name, others), value[name], root) for name in value)


CHECKS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "type": has_type,
    "properties": has_properties,
    "required": lambda schema, value, root: set(schema["required"]) <= value.keys(),
    "items": lambda schema, value, root: all(validate(schema["items"], item, root) for item in value),
    "minItems": lambda schema, value, root: len(value) >= schema["minItems"],
    "maxItems": lambda schema, value, root: len(value) <= schema["maxItems"],
    "minLength": lambda schema, value, root: len(value) >= schema["minLength"],
    "maxLength": lambda schema, value, root: len(value) <= schema["maxLength"],
    "pattern": lambda schema, value, root: re.search(schema["pattern"], value) is not None,
    "minimum": lambda schema, value, root: value >= schema["minimum"],
    "maximum": lambda schema, value, root: value <= schema["maximum"],
    "enum": lambda schema, value, root: value in schema["enum"],
    "const": lambda schema, value, root: value == schema["const"],
    "anyOf": lambda schema, value, root: any(validate(option, value, root) for option in schema["anyOf"]),
}

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 3, "maximum": 141},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        "kind": {"enum": ["cat", "dog", 7, None]},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "é"}]}, "maxItems": 3},
    },
    "required": ["name", "age", "code", "kind"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}

ARITHMETIC_LARK = 'start: term ("+" term)*\nterm: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
ARITHMETIC_GBNF = 'root ::= term ("+" term)*\nterm ::= "(" root ")" | number\nnumber ::= [0-9] [0-9]? [0-9]?'


def is_arithmetic(text: str) -> bool:
    """Reads the language of the two grammars above from left to right."""

    def sum_from(at: int) -> int:
        at = term_from(at)
        while at >= 0 and text[at : at + 1] == "+":
            at = term_from(at + 1)
        return at

    def term_from(at: int) -> int:
        if text[at : at + 1] == "(":
            at = sum_from(at + 1)
            return at + 1 if at >= 0 and text[at : at + 1] == ")" else -1
        digits = len(text[at : at + 4]) - len(text[at : at + 4].lstrip("0123456789"))
        return at + digits if 1 <= digits <= 3 else -1

    return sum_from(0) == len(text)


# ----------------------------------------------------------------------------------------------------- whole outputs

REGEXES = [
    r"[a-c]{3,5}",
    r"(GET|PUT) /[a-zé]{1,8}\?id=[0-9]+",
    r"-?[0-9]{1,3}(\.[0-9]{2})?",
    r"[^a-zA-Z]{1,4}é+!",
    r"^ab?$",
]
CHOICES = ("yes", "no", "not yet", "né 🎉", 'say "hi"\\\n', "北京")


class TestOutputs:
    @pytest.mark.parametrize("regex", REGEXES)
    def test_match_the_regex(self, vocabulary: Vocabulary, regex: str) -> None:
        assert all(re.fullmatch(regex, text) for text in outputs(vocabulary, regex=regex))

    def test_are_all_of_the_choices_and_no_other(self, vocabulary: Vocabulary) -> None:
        assert set(outputs(vocabulary, walks=60, choice=CHOICES)) == set(CHOICES)

    @pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
    def test_are_json_of_the_schema(self, vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
        assert all(validate(schema, json.loads(text), schema) for text in outputs(vocabulary, json_schema=schema))

    def test_of_a_schema_and_of_its_text_are_the_same(self, tiny: Vocabulary) -> None:
        assert list(outputs(tiny, json_schema=PERSON)) == list(outputs(tiny, json_schema=json.dumps(PERSON)))

    @pytest.mark.parametrize("grammar", [ARITHMETIC_LARK, ARITHMETIC_GBNF], ids=["lark", "gbnf"])
    def test_follow_the_grammar(self, vocabulary: Vocabulary, grammar: str) -> None:
        assert all(is_arithmetic(text) for text in outputs(vocabulary, grammar=grammar))

    def test_never_spell_a_property_in_a_second_way(self, tiny: Vocabulary) -> None:
        """A name that is escaped would escape its own rule: {"a": 1, "\\u0061": "x"} is JSON of the wrong type."""
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        guide = start(tiny.grammars(), json_schema=schema)
        for token in tiny.spell('{"a":1,"\\'):
            guide.accept(token)
        following = {(tiny.spellings[token] or b"")[:1] for token in allowed(guide, tiny.size)}
        assert following == {b'"', b"\\", b"b", b"f", b"n", b"r", b"t"}

    def test_without_a_guide_break_every_rule(self, tiny: Vocabulary) -> None:
        """The planted error: what the walks and oracles above do with no mask."""

        class Free:
            finished = False

            def mask(self, logits: Any) -> Any:
                return logits

            def accept(self, token: int) -> None: ...

        free: Any = Free()
        text = b"".join(
            tiny.spellings[token] or b"" for token in walk(tiny, free, 0, 20) if token < len(tiny.spellings)
        )
        assert not any(re.fullmatch(regex, text.decode(errors="replace")) for regex in REGEXES)
        assert not is_arithmetic(text.decode(errors="replace"))
        with pytest.raises(ValueError):
            json.loads(text)


class TestOracles:
    @pytest.mark.parametrize(
        "change", [{"age": 2}, {"name": ""}, {"code": "A-1"}, {"kind": 8}, {"tags": [1]}, {"x": 1}]
    )
    def test_refuse_what_breaks_the_schema(self, change: dict[str, Any]) -> None:
        person = {"name": "a", "age": 3, "code": "AB-1", "kind": None, "tags": [True]}
        assert validate(PERSON, person, PERSON)
        assert not validate(PERSON, person | change, PERSON)

    def test_refuse_what_breaks_the_grammar(self) -> None:
        assert is_arithmetic("(1+22)+333")
        assert not any(is_arithmetic(text) for text in ["", "1+", "(1", "1)", "1234", "1 + 2"])


# -------------------------------------------------------------------------------------------------------------- masks

# What may be read of an output before it is complete, derived by hand.
PARTIAL = {
    r"(ab|c)*d": r"(ab|c)*(a|d)?",
    r"the [a-z]{2,4}": r"(t|th|the|the [a-z]{0,4})?",
    r"x{0,9}": r"x{0,9}",
}


class TestMask:
    @pytest.mark.parametrize("regex", PARTIAL)
    def test_allows_just_what_can_still_match(self, vocabulary: Vocabulary, regex: str) -> None:
        grammars = vocabulary.grammars()
        for seed in range(4):
            guide = start(grammars, regex=regex)
            read = b""
            for token in walk(vocabulary, start(grammars, regex=regex), seed):
                assert agrees(vocabulary, guide, self.expected(vocabulary, regex, read))
                guide.accept(token)
                read += vocabulary.spellings[token] or b""

    @staticmethod
    def expected(vocabulary: Vocabulary, regex: str, read: bytes) -> set[int]:
        ends = set(vocabulary.eos) if re.fullmatch(regex.encode(), read) else set()
        partial = re.compile(PARTIAL[regex].encode())
        spelled = ((token, spelling) for token, spelling in enumerate(vocabulary.spellings) if spelling)
        return ends | {token for token, spelling in spelled if partial.fullmatch(read + spelling)}

    def test_allows_just_the_tokens_of_a_choice(self, vocabulary: Vocabulary) -> None:
        grammars = vocabulary.grammars()
        texts = [text.encode() for text in CHOICES]
        for text in CHOICES:
            guide = start(grammars, choice=CHOICES)
            read = b""
            while read != text.encode():
                spelled = ((i, read + spelling) for i, spelling in enumerate(vocabulary.spellings) if spelling)
                expected = {i for i, spelling in spelled if any(choice.startswith(spelling) for choice in texts)}
                expected |= set(vocabulary.eos) if read in texts else set()
                assert agrees(vocabulary, guide, expected)
                token = (guide.forced() or vocabulary.spell(text.encode()[len(read) :].decode(errors="ignore")))[0]
                guide.accept(token)
                read += vocabulary.spellings[token] or b""

    def test_brute_force_notices_a_token_too_many(self, tiny: Vocabulary) -> None:
        """The planted error: another regex, which differs in its last character only."""
        guide = start(tiny.grammars(), regex=r"(ab|c)*[de]")
        assert not agrees(tiny, guide, self.expected(tiny, r"(ab|c)*d", b""))

    def test_leaves_the_logits_and_keeps_those_allowed(self, tiny: Vocabulary) -> None:
        logits = np.random.default_rng(0).normal(0, 3, tiny.size).astype(np.float32)
        before = logits.copy()
        guide = start(tiny.grammars(), regex="[a-z]+")
        masked = guide.mask(logits)
        kept = np.isfinite(masked)
        np.testing.assert_array_equal(logits, before)
        np.testing.assert_array_equal(masked[kept], logits[kept])
        assert set(masked[~kept]) == {-np.inf}
        assert masked.dtype == np.float32

    def test_never_allows_special_tokens_nor_padding(self, vocabulary: Vocabulary) -> None:
        guide = start(vocabulary.grammars(), regex=r"(?s:.*)")
        ordinary = {token for token, spelling in enumerate(vocabulary.spellings) if spelling is not None}
        assert allowed(guide, vocabulary.size) - set(vocabulary.eos) <= ordinary

    def test_allows_no_padding_by_its_number(self, tiny: Vocabulary) -> None:
        with pytest.raises(GrammarError, match="no token"):
            tiny.grammars().guide(Form(grammar=f"start: <[{len(tiny.spellings) + 1}]>"))

    def test_allows_a_special_token_that_the_grammar_names(self, byte_level: Vocabulary) -> None:
        guide = start(byte_level.grammars(eos=(0,)), grammar='start: <|turn|> "x"')
        assert allowed(guide, byte_level.size) == {1}

    def test_fits_a_model_with_fewer_tokens_than_the_tokenizer(self, tiny: Vocabulary) -> None:
        size = len(tiny.spellings) - 1003
        guide = start(Grammars(tiny.tokenizer, size, (0,)), regex="[a-z ]+")
        logits = np.random.default_rng(0).normal(0, 3, size).astype(np.float32)
        for _ in range(20):
            guide.accept(int(guide.mask(logits).argmax()))
            assert all(token < size for token in guide.forced())

    def test_is_the_same_for_every_thread(self, tiny: Vocabulary) -> None:
        alone = list(outputs(tiny, walks=8, json_schema=PERSON))
        grammars = tiny.grammars()

        def run(seed: int) -> str:
            return tiny.text(walk(tiny, start(grammars, json_schema=PERSON), seed))

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, range(8))) == alone


class TestEnd:
    def test_is_every_end_of_sequence_token_where_the_output_is_complete(self, byte_level: Vocabulary) -> None:
        guide = start(byte_level.grammars(eos=(0, 1)), regex="ab?")
        first, second = byte_level.spell("a") + byte_level.spell("b")
        assert not allowed(guide, byte_level.size) & {0, 1}
        guide.accept(first)
        assert allowed(guide, byte_level.size) == {0, 1, second}
        assert not guide.finished
        guide.accept(second)
        assert allowed(guide, byte_level.size) == {0, 1}
        assert guide.finished

    @pytest.mark.parametrize("eos", [0, 1])
    def test_comes_once(self, byte_level: Vocabulary, eos: int) -> None:
        guide = start(byte_level.grammars(eos=(0, 1)), regex="a+")
        guide.accept(*byte_level.spell("a"))
        guide.accept(eos)
        assert guide.finished
        assert allowed(guide, byte_level.size) == {0, 1}
        assert guide.forced() == []
        with pytest.raises(GrammarError, match="after its end"):
            guide.accept(0)

    def test_ignores_ids_that_have_no_token(self, tiny: Vocabulary) -> None:
        guide = start(tiny.grammars(eos=(0, tiny.size - 1, 10**6)), regex="a?")
        assert allowed(guide, tiny.size) & {0, tiny.size - 1} == {0}

    @pytest.mark.parametrize("eos", [(), (10**6,)])
    def test_is_needed(self, tiny: Vocabulary, eos: tuple[int, ...]) -> None:
        with pytest.raises(GrammarError, match="end-of-sequence"):
            tiny.grammars(eos=eos).guide(Form(regex="a"))

    def test_is_never_text_even_if_it_has_one(self, tiny: Vocabulary) -> None:
        (comma,) = tiny.spell(",")
        guide = start(tiny.grammars(eos=(comma,)), regex="a?,?")
        guide.accept(comma)
        assert guide.finished
        with pytest.raises(GrammarError, match="no token"):
            tiny.grammars(eos=(comma,)).guide(Form(regex=","))


class TestSteps:
    def test_refuse_a_token_outside_the_mask_and_stay(self, tiny: Vocabulary) -> None:
        guide = start(tiny.grammars(), regex="a+")
        before = allowed(guide, tiny.size)
        for token in (*tiny.spell("b"), 0, -1, tiny.size - 1, tiny.size, 10**9):
            with pytest.raises(GrammarError, match=f"token {token} is not allowed after 0 tokens by regex"):
                guide.accept(token)
        assert allowed(guide, tiny.size) == before
        guide.accept(*tiny.spell("a"))

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_taken_back_leave_no_trace(self, vocabulary: Vocabulary, count: int) -> None:
        grammars = vocabulary.grammars()
        guide, other = start(grammars, json_schema=PERSON), start(grammars, json_schema=PERSON)
        tokens = walk(vocabulary, start(grammars, json_schema=PERSON), 3)
        for index, token in enumerate(tokens):
            guide.accept(token)
            if index >= count:
                guide.rollback(count)
                other.accept(tokens[index - count])
                assert allowed(guide, vocabulary.size) == allowed(other, vocabulary.size)
                for again in tokens[index - count + 1 : index + 1]:
                    guide.accept(again)

    def test_taken_back_include_the_end(self, tiny: Vocabulary) -> None:
        guide = start(tiny.grammars(), regex="a+")
        guide.accept(*tiny.spell("a"))
        guide.accept(0)
        guide.rollback(1)
        assert not guide.finished
        guide.accept(2)
        guide.rollback(2)
        assert not allowed(guide, tiny.size) & {0, 2}

    @pytest.mark.parametrize("count", [-1, 3])
    def test_taken_back_are_at_most_those_accepted(self, tiny: Vocabulary, count: int) -> None:
        guide = start(tiny.grammars(), regex="a+")
        guide.accept(*tiny.spell("a"))
        guide.accept(0)
        with pytest.raises(UsageError, match=f"cannot take back {count} tokens of 2"):
            guide.rollback(count)

    def test_of_a_fork_are_its_own(self, tiny: Vocabulary) -> None:
        guide = start(tiny.grammars(), regex="(ab|cd)+")
        guide.accept(*tiny.spell("a"))
        fork = guide.fork()
        fork.accept(*tiny.spell("b"))
        fork.accept(0)
        assert fork.finished and not guide.finished
        assert 0 not in allowed(guide, tiny.size)
        guide.accept(*tiny.spell("b"))
        fork.rollback(2)
        assert 0 in allowed(guide, tiny.size) and 0 not in allowed(fork, tiny.size)

    def test_forced_spell_the_only_text_left(self, vocabulary: Vocabulary) -> None:
        guide = start(vocabulary.grammars(), regex="(x|y)over the fox")
        assert guide.forced() == []
        guide.accept(*vocabulary.spell("x"))
        drafts = guide.forced()
        assert "over the fox".startswith(vocabulary.text(drafts)) and drafts
        for token in drafts:
            guide.accept(token)

    def test_end_with_an_error_where_no_token_spells_the_rest(self) -> None:
        backend = Backend(models.WordLevel({"<end>": 0, "ab": 1, "a": 2, "bc": 3, "x": 4}, unk_token="<end>"))
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<end>"])
        guide = start(Grammars(Tokenizer(backend, {}), 5, (0,)), regex="(a|ab)c|x")
        assert allowed(guide, 5) == {1, 2, 4}
        guide.accept(1)
        with pytest.raises(GrammarError, match="regex allows no token of the vocabulary after 1 tokens"):
            guide.mask(np.zeros(5, np.float32))


# ------------------------------------------------------------------------------------------------------------- errors


def references(count: int) -> dict[str, Any]:
    """A schema that nests as many others by reference."""
    nested = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**nested, f"d{count}": {"type": "string"}}}


CIRCULAR: dict[str, Any] = {"type": "array"}
CIRCULAR["items"] = CIRCULAR

USAGE = [
    ({"regex": "a", "choice": ("a",)}, "regex and choice are given together"),
    ({"choice": ()}, "one or more texts"),
    ({"choice": ("a", "")}, "none of them empty"),
    ({"choice": "abc"}, "choice is str, expected a tuple"),
    ({"choice": ("a", 3)}, "choice is int, expected str"),
    ({"regex": 3}, "regex is int, expected str"),
    ({"regex": "a\ud800"}, "character 1 is a lone surrogate"),
    ({"grammar": b"start: A"}, "grammar is bytes, expected str"),
    ({"json_schema": 3}, "json_schema is int"),
    ({"json_schema": "{"}, "no JSON: Expecting property name"),
    ({"json_schema": "[1]"}, "JSON of type list, expected an object"),
    ({"json_schema": '{"a":' * 100_000}, "no JSON: maximum recursion depth"),
    ({"json_schema": {"enum": {1, 2}}}, "no JSON: Object of type set"),
    ({"json_schema": {"minimum": float("nan")}}, "no JSON"),
    ({"json_schema": CIRCULAR}, "no JSON: Circular reference"),
]
GRAMMAR = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(?-u:\xff)"}, "invalid UTF-8"),
    ({"regex": "a?" * 100_000}, "200000 characters, expected at most 16384"),
    ({"regex": "(a|bc)?" * 2000}, "lexer"),
    ({"regex": r"[^\x00-\U0010FFFF]"}, "it allows no text"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": "root ::= foo\n"}, "Rule 'foo' not found"),
    ({"grammar": "start: start"}, "it allows no text"),
    ({"grammar": ""}, "No 'root' rule"),
    ({"grammar": "start: " + "(" * 20_000}, "deeply nested|lexer error"),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, 'cannot be enforced.*"not"'),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "does not fetch"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "none"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "it allows no text"),
    ({"json_schema": {"enum": []}}, "Unsatisfiable"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, "expected at most 262144"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    ({"json_schema": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
    ({"json_schema": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
]


class TestErrors:
    @pytest.mark.parametrize(("form", "message"), USAGE)
    def test_name_what_is_wrong_with_an_argument(self, tiny: Vocabulary, form: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            tiny.grammars().guide(Form(**form))

    @pytest.mark.parametrize(("form", "message"), GRAMMAR)
    def test_say_why_a_grammar_is_refused(self, tiny: Vocabulary, form: dict[str, Any], message: str) -> None:
        with pytest.raises(GrammarError, match=message):
            tiny.grammars().guide(Form(**form))

    def test_name_the_choice_that_no_tokens_spell(self) -> None:
        backend = Backend(models.WordLevel({"<end>": 0, "yes": 1, "no": 2}, unk_token="<end>"))
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<end>"])
        grammars = Grammars(Tokenizer(backend, {}), 3, (0,))
        start(grammars, choice=("yes", "no", "noyes"))
        with pytest.raises(GrammarError, match="spell 'maybe'"):
            grammars.guide(Form(choice=("yes", "maybe")))

    def test_say_which_extra_is_missing(self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingExtraError, match=r"llmc\[guided\]"):
            tiny.grammars().guide(Form(regex="a"))

    def test_do_not_come_where_no_form_is_asked_for(self, tiny: Vocabulary) -> None:
        assert tiny.grammars().guide(Form()) is None

    @pytest.mark.parametrize(
        "form",
        [
            {"json_schema": references(3000)},
            {"grammar": "\n".join(["start: r0", *(f"r{i:x}: r{i + 1:x}" for i in range(5000)), 'r1388: "a"'])},
        ],
        ids=["json_schema", "grammar"],
    )
    def test_do_not_come_from_a_caller_with_a_small_stack(self, tiny: Vocabulary, form: dict[str, Any]) -> None:
        """The library recurses; a stack that overflows would end the process."""
        grammars = tiny.grammars()
        found: list[Guide] = []
        before = threading.stack_size(SMALL_STACK)
        try:
            caller = threading.Thread(target=lambda: found.append(start(grammars, **form)))
            caller.start()
        finally:
            threading.stack_size(before)
        caller.join()
        assert allowed(found[0], tiny.size)


# A lexer with up to 2**12 states, of which a request meets some dozens.
MANY_STATES = "[ab]*a[ab]{12}"
FEW_STATES = 300
FEW_TOKENS = 25


class TestLexerStates:
    def test_used_up_by_requests_do_not_end_another(self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guided, "_MOST_LEXER_STATES", FEW_STATES)
        grammars = tiny.grammars()
        for seed in range(30):
            tokens = walk(tiny, start(grammars, regex=MANY_STATES), seed, most=FEW_TOKENS)
            assert re.fullmatch("[ab]+", tiny.text(tokens))

    def test_would_end_another_if_nothing_were_built_anew(
        self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guided, "_MOST_LEXER_STATES", FEW_STATES)
        monkeypatch.setattr(guided._GrammarGuide, "_renew", lambda self: None)
        grammars = tiny.grammars()
        with pytest.raises(GrammarError, match="too many states"):
            for seed in range(30):
                walk(tiny, start(grammars, regex=MANY_STATES), seed, most=FEW_TOKENS)

    def test_used_up_by_one_request_end_it_with_an_error(
        self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library's mask would then allow the end of the sequence, and nothing else."""
        monkeypatch.setattr(guided, "_MOST_LEXER_STATES", FEW_STATES)
        guide = start(tiny.grammars(), regex=MANY_STATES)
        random = np.random.default_rng(0)
        with pytest.raises(GrammarError, match="too many states"):
            for _ in range(MOST_TOKENS):
                logits = random.normal(0, 3, tiny.size).astype(np.float32)
                logits[list(tiny.eos)] = -np.inf
                guide.accept(int(guide.mask(logits).argmax()))


class TestCache:
    def test_compiles_equal_grammars_once(self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled: list[str] = []
        build = guided._Compiled._build
        monkeypatch.setattr(guided._Compiled, "_build", lambda self: compiled.append(self.kind) or build(self))
        grammars = tiny.grammars()
        for form in [{"json_schema": PERSON}, {"regex": "a"}, {"choice": ("a", "b")}, {"choice": ["a", "b", "a"]}] * 3:
            start(grammars, **form)
        start(grammars, json_schema=json.dumps(PERSON))
        assert compiled == ["json_schema", "regex", "choice"]

    def test_keeps_the_last_used(self, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guided, "_MOST_GRAMMARS", 2)
        grammars = tiny.grammars()
        for regex in ("a", "b", "a", "c"):
            start(grammars, regex=regex)
        assert [source.text for source in grammars._compiled] == ["a", "c"]

    def test_keeps_no_grammar_that_failed(self, tiny: Vocabulary) -> None:
        grammars = tiny.grammars()
        for _, regex in itertools.product(range(2), ["(", "start"]):
            with pytest.raises(GrammarError) if regex == "(" else pytest.MonkeyPatch.context():
                start(grammars, regex=regex)
        assert [source.text for source in grammars._compiled] == ["start"]
