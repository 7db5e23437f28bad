"""The JSON-Schema-Test-Suite, and random schemas: what is accepted is enforced, what is refused says why.

The cases stand in json_schema_test_suite.jsonl, a line each, with their licence beside it.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided import json_schema
from llmc.runtime.guided.guide import CompiledGrammar, GrammarGuide
from llmc.runtime.sampling.params import SamplingParams

SUITE = Path(__file__).with_name("json_schema_test_suite.jsonl")
VALIDATORS = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}
WALKS = 1
# Valid by the suite and never written: see "Guided decoding" in runtime/README.md.
UNWRITTEN = {
    "allOf": "names in the order of the first subschema that has them",
    "const": "an object in its own order",
    "format": "formats are enforced, not mere annotations",
    "optional/float-overflow": "integers without exponents",
    "optional/ecmascript-regex": "one control character of each class may be missing",
    "optional/format/date-time": "leap seconds beside an offset",
    "optional/format/time": "leap seconds beside an offset",
    "optional/format/email": "quoted local parts and addresses of IPv6",
    "optional/format/hostname": "names of the punycode kind",
    "optional/format/ipv6": "the last part as IPv4",
    "ref": "draft 7 ignores what stands beside $ref",
}
MOST_UNWRITTEN = 10  # in one file
# Reasons that do not name a keyword as the schema writes it.
REASONS = (
    "schema is false",
    "Resource 'http",
    "Anchor '",
    "float range",
    "patternProperty",
    "Unknown format",
    "Unimplemented keys",
)


def cases() -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for line in SUITE.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        found[case["file"]].append(case)
    return found


CASES = cases()


def finished_outputs(vocabulary: Any, compiled: CompiledGrammar) -> list[str]:
    """Outputs at random logits that more and more prefer what ends a text."""
    short = np.array([len(spelling or b"??") == 1 for spelling in vocabulary.spellings], np.float32)
    ends = np.array([(spelling or b"?")[:1] in b'"]}' for spelling in vocabulary.spellings], np.float32)
    bonus = np.pad(short / 2 + ends, (0, vocabulary.size - short.size))
    bonus[list(vocabulary.eos)] = 2
    found = []
    for seed in range(WALKS):
        guide, random, tokens = GrammarGuide(compiled), np.random.default_rng(seed), []
        while not guide.finished and len(tokens) < 60:
            logits = random.normal(0, 3, vocabulary.size).astype(np.float32)
            tokens.append(int(guide.mask(logits + bonus * (2 + len(tokens) / 2)).argmax()))
            guide.accept(tokens[-1])
        if guide.finished:
            found.append(vocabulary.text([token for token in tokens if token not in vocabulary.eos]))
    return found


def integral_float(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, float) and value.is_integer()) or any(map(integral_float, parts))


def keywords(value: Any) -> set[str]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(keywords, parts))


class TestSuite:
    @pytest.mark.threat("schema-enforced")
    @pytest.mark.parametrize("file", sorted(CASES))
    def test_is_enforced_or_refused_by_name(self, byte_level, file):
        unwritten = 0
        for case in CASES[file]:
            schema, where = case["schema"], f"{case['draft']}: {case['description']}"
            try:
                compiled = byte_level.shared.compile_grammar(SamplingParams(json_schema=schema))
            except GrammarError as error:
                named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in keywords(schema))
                assert named or any(reason in str(error) for reason in REASONS), (where, str(error))
                continue
            if "ecmascript" not in file:  # Python's own notation differs
                validator = VALIDATORS[case["draft"]](schema)
                for text in finished_outputs(byte_level, compiled):
                    assert validator.is_valid(json.loads(text)), (where, text)
            texts = {True: case["valid"], False: [] if file.endswith("content") else case["invalid"]}
            for valid, instances in texts.items():
                for instance in instances:
                    read = byte_level.reads(GrammarGuide(compiled), json.dumps(instance, ensure_ascii=False))
                    assert valid or not read, (where, instance)
                    unwritten += valid and not read and not integral_float(instance)
        assert unwritten <= (MOST_UNWRITTEN if file in UNWRITTEN else 0)

    @pytest.mark.parametrize("keyword", sorted(json_schema._KEYWORDS - json_schema.ANNOTATIONS - {"minProperties"}))
    def test_takes_every_keyword_that_is_not_refused_by_name(self, byte_level, keyword):
        schemas = [case["schema"] for found in CASES.values() for case in found if keyword in keywords(case["schema"])]
        for schema in sorted(schemas, key=lambda schema: len(json.dumps(schema))):
            with suppress(GrammarError):
                byte_level.start(json_schema=schema)
                return
        pytest.fail("all cases with it are refused")

    def test_notices_an_output_that_breaks_a_schema(self, byte_level):
        """The planted error: a validator of another schema."""
        compiled = byte_level.shared.compile_grammar(SamplingParams(json_schema={"enum": ["a", "b"]}))
        texts = finished_outputs(byte_level, compiled)
        assert texts
        assert not any(VALIDATORS["draft7"]({"enum": ["c"]}).is_valid(json.loads(text)) for text in texts)


def random_schema(random: Random, depth: int = 0) -> Any:
    """A schema of keywords that are enforced, often contradictory or odd."""
    kind = random.choice(["object", "array", "string", "integer", "number", "enum", "any", "anyOf", "allOf"])
    if depth > 2 and kind in ("object", "array", "anyOf", "allOf"):
        kind = "enum"
    low, high = sorted(random.choices([-7.5, -3, 0, 0.25, 1, 2, 9.75, 100, 12345.5], k=2))
    below = [random_schema(random, depth + 1) for _ in range(random.randint(1, 3))] if depth < 3 else []
    value = random.choice(['a"\\', "é🎉", "\x01", "\x7f\n", "", 0, -1.5, 1e3, True, None, [1, {"k": "\t"}], {"a": []}])
    names = random.sample(["a", "b", 'q"', "n\n", "\x02"], k=len(below))
    patterns = ['^[^"]{1,3}$', "[\\\\x]$", "^[ -~]*$", "^(ab|c){2,4}$", "\\d\\D", "^\\S+\\s$", "^[\x00-\x1f]$"]
    choices: dict[str, dict[str, Any]] = {
        "object": {
            "type": "object",
            "properties": dict(zip(names, below, strict=True)),
            "required": names[:1],
            "additionalProperties": random.choice([False, False, True]),
        },
        "array": {"type": "array", "prefixItems": below[1:], "items": (below or [True])[0], "maxItems": 2},
        "string": {"type": "string", random.choice(["minLength", "maxLength"]): 2}
        | random.choice([{}, {"pattern": random.choice(patterns)}, {"format": random.choice(["date", "ipv4"])}]),
        "integer": {"type": "integer", "minimum": low, "maximum": high, "multipleOf": random.choice([1, 3, 0.5])},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": high},
        "enum": {"enum": [value, random.randint(0, 9)]},
        "any": {"const": value, "description": "x"},
        "anyOf": {"anyOf": below},
        "allOf": {"allOf": below[:2]},
    }
    return choices[kind]


class TestRandomSchemas:
    @pytest.mark.parametrize("seed", range(12))
    def test_are_enforced_or_refused(self, byte_level, seed):
        random = Random(seed)
        for _ in range(12):
            schema = random_schema(random)
            try:
                compiled = byte_level.shared.compile_grammar(SamplingParams(json_schema=schema))
            except GrammarError:
                continue
            for text in finished_outputs(byte_level, compiled):
                assert VALIDATORS["draft2020-12"](schema).is_valid(json.loads(text)), (schema, text)
