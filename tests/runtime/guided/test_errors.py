"""What is refused, and what one request must not do to another."""

import json
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.errors import DeadlineError, GrammarError, MissingExtraError, ResourceError, UsageError
from llmc.runtime.guided import grammars as grammars_module
from llmc.runtime.guided import guide as guide_module
from llmc.runtime.guided import trial
from llmc.runtime.guided.guide import GrammarGuide
from llmc.runtime.sampling.params import SamplingParams

# A stack below which the library's recursion over the deepest inputs overflows by far.
SMALL_STACK = 256 * 1024
MOST_TOKENS = 600


def references(count: int) -> dict[str, Any]:
    """A schema that nests as many others by reference."""
    nested = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**nested, f"d{count}": {"type": "string"}}}


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}

USAGE = [
    ({"regex": "a\ud800"}, "character 1 is a lone surrogate"),
    ({"json_schema": "{"}, "not valid JSON: Expecting property name"),
    ({"json_schema": "[1]"}, "JSON of type list, expected an object"),
    ({"json_schema": '{"a":' * 100_000}, "not valid JSON: maximum recursion depth"),
    ({"json_schema": {"minimum": float("nan")}}, "not valid JSON"),
]
GRAMMAR = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "a?" * 100_000}, "200000 characters, expected at most 16384"),
    ({"regex": "(a|bc)?" * 2000}, "lexer"),
    ({"regex": r"[^\x00-\U0010FFFF]"}, "it allows no text"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": "root ::= foo\n"}, "no rule 'foo'; define it"),
    ({"grammar": " "}, "no rule 'root'"),
    ({"grammar": "start: " + "(" * 20_000}, "deeply nested|lexer error"),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "'x-guidance' at #, which cannot"),
    ({"grammar": 'start: "a" | %json {"not": {}}'}, "'not' at #, which cannot be enforced"),
    ({"grammar": "start: %json {"}, "invalid JSON after %json"),
    ({"grammar": 'start: A\nA: "a"{2000000000}'}, "repeats something 2000000000 times, expected at most 16384"),
    ({"grammar": 'start: ("a"~1..4000000000)'}, "repeats something 4000000000 times"),
    ({"regex": "a{4000000000}"}, "repeats something 4000000000 times"),
    ({"regex": "((a{1000}){1000}){1000}b"}, "repeats something 1000000000 times"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "does not fetch"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "none"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "it allows no text"),
    ({"json_schema": {"const": "\ud800"}}, "cannot be read"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, "expected at most 262144"),
    ({"json_schema": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
    ({"json_schema": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
]


class TestErrors:
    @pytest.mark.parametrize(("form", "message"), USAGE)
    def test_name_what_is_wrong_with_an_argument(self, tiny, form, message):
        with pytest.raises(UsageError, match=message):
            tiny.ask(**form)

    @pytest.mark.parametrize(("form", "message"), GRAMMAR)
    def test_say_why_a_grammar_is_refused(self, tiny, form, message):
        with pytest.raises(GrammarError, match=message):
            tiny.ask(**form)

    def test_say_which_extra_is_missing(self, tiny, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'llguidance>="):
            tiny.ask(tiny.grammars(), regex="a")

    def test_do_not_come_where_no_form_is_asked_for(self, tiny):
        assert tiny.ask() is None

    @pytest.mark.parametrize(
        "form",
        [
            {"json_schema": references(3000)},
            {"grammar": "\n".join(["start: r0", *(f"r{i:x}: r{i + 1:x}" for i in range(5000)), 'r1388: "a"'])},
        ],
        ids=["json_schema", "grammar"],
    )
    def test_do_not_come_from_a_caller_with_a_small_stack(self, tiny, form):
        """The library recurses; a stack that overflows would end the process."""
        grammars = tiny.grammars()
        found: list[GrammarGuide] = []
        before = threading.stack_size(SMALL_STACK)
        try:
            caller = threading.Thread(target=lambda: found.append(tiny.start(grammars, **form)))
            caller.start()
        finally:
            threading.stack_size(before)
        caller.join()
        assert tiny.allowed(found[0])


# A lexer with up to 2**12 states, of which a request meets some dozens.
MANY_STATES = "[ab]*a[ab]{12}"
FEW_STATES = 300
FEW_TOKENS = 25


class TestLexerStates:
    def test_used_up_by_requests_do_not_end_another(self, tiny, monkeypatch):
        monkeypatch.setattr(guide_module, "_MOST_LEXER_STATES", FEW_STATES)
        grammars = tiny.grammars()
        for seed in range(30):
            tokens = tiny.walk(tiny.start(grammars, regex=MANY_STATES), seed, most=FEW_TOKENS)
            assert re.fullmatch("[ab]+", tiny.text(tokens))

    def test_used_up_by_one_request_end_it_with_an_error(self, tiny, monkeypatch):
        """The library's mask would then allow the end of the sequence, and nothing else."""
        monkeypatch.setattr(guide_module, "_MOST_LEXER_STATES", FEW_STATES)
        guide = tiny.start(regex=MANY_STATES)
        random = np.random.default_rng(0)
        with pytest.raises(GrammarError, match="too many states"):
            for _ in range(MOST_TOKENS):
                logits = random.normal(0, 3, tiny.size).astype(np.float32)
                logits[list(tiny.eos)] = -np.inf
                guide.accept(int(guide.mask(logits).argmax()))


def test_a_grammar_too_complex_for_the_parser_ends_its_request_at_once(tiny, monkeypatch):
    monkeypatch.setattr(guide_module.CompiledGrammar, "renew", lambda self: pytest.fail("compiled again, in vain"))
    guide = tiny.start(tiny.grammars(), grammar='start: ((("a"~1..1000)~1..1000)~1..1000)')
    with pytest.raises(GrammarError, match="max is 2000"):
        for _ in range(100):
            guide.accept(*tiny.spell(b"a"))


LITTLE_S = 0.3  # of a processor, for a grammar that takes some hundredths
# Some dozens of alternatives, which the library multiplies with each other: minutes.
MANY_COMBINATIONS = {
    "allOf": [{"anyOf": [{"type": "string", "pattern": f"{i}a{j}"} for i in range(30)]} for j in range(3)]
}
FEW_COMBINATIONS = {"allOf": [{"anyOf": [{"const": i} for i in range(11)]}, {"enum": list(range(10))}]}


class TestTime:
    @pytest.mark.threat("grammar-cost")
    def test_of_compiling_ends_with_an_error(self, tiny, monkeypatch):
        monkeypatch.setattr(trial, "COMPILE_SECONDS", 0.3)
        start = time.monotonic()
        with pytest.raises(GrammarError, match=r"json_schema takes longer than 0.3 s to compile; make it smaller"):
            tiny.ask(json_schema=MANY_COMBINATIONS)
        assert time.monotonic() - start < 3

    def test_is_that_of_the_request_where_it_has_less(self, tiny):
        with pytest.raises(DeadlineError, match=r"deadline of 0.2 s passed while json_schema was compiled"):
            tiny.shared.compile_grammar(SamplingParams(json_schema=MANY_COMBINATIONS), 0.2)

    def test_is_bounded_without_a_process_as_well(self, tiny, monkeypatch):
        monkeypatch.setattr(guide_module.CompiledGrammar, "_build", lambda self: time.sleep(0.2))
        with pytest.raises(DeadlineError, match=r"deadline of 0.01 s passed while regex was compiled"):
            tiny.shared.compile_grammar(SamplingParams(regex="never compiled before"), 0.01)

    @pytest.mark.threat("grammar-cost")
    def test_counts_what_the_grammar_takes_and_not_what_a_busy_machine_does(self, tiny, monkeypatch):
        monkeypatch.setattr(trial, "COMPILE_SECONDS", LITTLE_S)
        monkeypatch.setattr(trial, "_CODE", f"import time; time.sleep({2 * LITTLE_S})\n{trial._CODE}")
        assert tiny.reads(tiny.start(tiny.grammars(), json_schema=FEW_COMBINATIONS), "7")

    @pytest.mark.threat("grammar-cost")
    def test_spent_on_others_grammars_is_not_held_against_it(self, tiny, monkeypatch):
        monkeypatch.setattr(trial, "WAIT_SECONDS", 0.01)
        monkeypatch.setattr(trial, "_MOST_AT_ONCE", threading.BoundedSemaphore(1))
        with trial._MOST_AT_ONCE, pytest.raises(ResourceError, match=r"other requests .* try again later"):
            tiny.ask(tiny.grammars(), json_schema=FEW_COMBINATIONS)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (("_MEMORY_BYTES", 1024**2), "takes more than .* to compile, or ends the process"),
            (("sys", SimpleNamespace(executable="/nowhere", path=[])), "no process can be started to try it"),
        ],
        ids=["memory", "process"],
    )
    def test_is_not_the_only_bound(self, tiny, monkeypatch, change, message):
        monkeypatch.setattr(trial, *change)
        with pytest.raises(GrammarError, match=message):
            tiny.ask(tiny.grammars(), json_schema=FEW_COMBINATIONS)

    @pytest.mark.threat("grammar-cost")
    def test_is_spent_once_on_a_grammar_that_takes_long(self, tiny, monkeypatch):
        """Compiling anew, for an exhausted lexer, happens in the engine's thread."""
        monkeypatch.setattr(guide_module, "_MOST_LEXER_STATES", FEW_STATES)
        monkeypatch.setattr(guide_module, "_QUICK_SECONDS", 0.0)
        grammars = tiny.grammars()
        with pytest.raises(GrammarError, match="too many states"):
            for seed in range(30):
                tiny.walk(tiny.start(grammars, regex=MANY_STATES), seed, most=FEW_TOKENS)


class TestCache:
    def test_compiles_equal_grammars_once(self, tiny, monkeypatch):
        compiled: list[str] = []
        build = guide_module.CompiledGrammar._build
        monkeypatch.setattr(
            guide_module.CompiledGrammar, "_build", lambda self: compiled.append(self.kind) or build(self)
        )
        grammars = tiny.grammars()
        for form in [{"json_schema": SCHEMA}, {"regex": "a"}, {"choice": ("a", "b")}, {"choice": ("a", "b", "a")}] * 3:
            tiny.start(grammars, **form)
        tiny.start(grammars, json_schema=json.dumps(SCHEMA))
        assert compiled == ["json_schema", "regex", "choice"]

    def test_keeps_the_last_used_and_none_that_failed(self, tiny, monkeypatch):
        monkeypatch.setattr(grammars_module, "_MOST_GRAMMARS", 2)
        grammars = tiny.grammars()
        for regex in ("a", "b", "a", "c"):
            tiny.start(grammars, regex=regex)
        with pytest.raises(GrammarError):
            tiny.start(grammars, regex="(")
        assert [text for _, text, _ in grammars._compiled] == ["a", "c"]
