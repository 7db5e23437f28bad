"""The grammars of requests: read, check, compile and cache them."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from llmc.errors import GrammarError, UsageError, require
from llmc.runtime.guided.gbnf import is_gbnf, to_lark
from llmc.runtime.guided.guide import CompiledGrammar
from llmc.runtime.guided.json_schema import check_schema, enforceable, options, schema_text
from llmc.runtime.guided.patterns import LONGEST_REGEX, MOST_REPETITIONS, check_regex, repetitions
from llmc.runtime.guided.trial import Clock
from llmc.runtime.guided.vocabulary import Vocabulary, shorten_reason
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.text.tokenizer import Tokenizer

# Characters at most.
_LONGEST = {"json_schema": 256 * 1024, "regex": LONGEST_REGEX, "grammar": 64 * 1024, "choice": 64 * 1024}
# A longer grammar is first tried in another process.
_LONGEST_QUICK = {"json_schema": 8 * 1024, "regex": 1024, "grammar": 4 * 1024, "choice": 64 * 1024}
_MOST_GRAMMARS = 64
# Texts, comments and regular expressions, which are not changed.
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_COUNT = re.compile(r"~\s*([0-9]+)(?:\s*\.\.\s*([0-9]+))?")


class Grammars:
    """Compiles the grammars of one model's requests and caches the last 64. Safe to share between threads.

    The first grammar loads the vocabulary, which takes about a second for 150,000 tokens.

    Args:
        vocab_size: length of the model's logits. Ids without a token in the tokenizer are never allowed.
        eos_token_ids: tokens that end an output; all are allowed where it is complete, none elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str, bool], CompiledGrammar] = OrderedDict()

    def compile_grammar(self, params: SamplingParams, deadline_s: float | None = None) -> CompiledGrammar | None:
        """The grammar of the output that ``params`` asks for; None if the output is free.

        ``deadline_s`` is the time left to the request, in seconds.

        Raises:
            UsageError: a text is not valid Unicode, or a schema is not a JSON object.
            GrammarError: the grammar is invalid, too complex, not enforceable, or allows no token.
            DeadlineError: the deadline passed.
            MissingExtraError: llguidance is not installed.
        """
        clock = Clock(deadline_s)
        source = read_source(params)
        if source is None:
            return None
        with self._lock:
            compiled = self._compiled.pop(source, None)
            vocabulary = self._vocabulary
        if compiled is None:  # outside the lock: compiling may take a second
            compiled = CompiledGrammar(source[0], *_library_grammar(*source), vocabulary, clock)
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self._tokenizer, self._vocab_size, self._eos_token_ids)


def read_source(params: SamplingParams) -> tuple[str, str, bool] | None:
    """A request's grammar as written: its parameter's name, its text, and whether its JSON is compact."""
    kind = next((kind for kind in _READ if getattr(params, kind) is not None), None)
    if kind is None:
        return None
    text = _READ[kind](getattr(params, kind), kind)
    if len(text) > _LONGEST[kind]:
        raise GrammarError(kind, f"has {len(text)} characters, expected at most {_LONGEST[kind]}")
    return kind, text, params.compact_json


def _library_grammar(kind: str, text: str, compact: bool) -> tuple[str, bool]:
    """The grammar in the library's own format, and True if compiling that may take long."""
    matcher = require("llguidance", "guided").LLMatcher
    laborious = len(text) > _LONGEST_QUICK[kind]
    try:
        if kind == "choice":
            return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choice_terminal(text)}\n")), laborious
        if kind == "regex":
            check_regex(text, "regex")
            return str(matcher.grammar_from_regex(text)), laborious
        if kind == "grammar":
            lark, schemas = (to_lark(text), False) if is_gbnf(text) else _check_lark(text, compact)
            return str(matcher.grammar_from_lark(lark)), laborious or schemas
        schema = json.loads(text)
        laborious |= check_schema(schema)
        return str(matcher.grammar_from_json_schema(enforceable(schema), overrides=options(compact))), laborious
    except (ValueError, RecursionError) as error:
        raise GrammarError(kind, f"cannot be read: {shorten_reason(str(error))}") from error


def compile_bytes(kind: str, text: str) -> CompiledGrammar:
    """Compile a grammar over single bytes as tokens. Raises GrammarError: it cannot be enforced."""
    return CompiledGrammar(kind, *_library_grammar(kind, text, False), Vocabulary.of_bytes(), Clock())


def choice_terminal(choices: str) -> str:
    """One terminal for a JSON list of texts: the lexer follows it as a table, faster than a rule with many choices."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(choices))


def _check_lark(grammar: str, compact: bool) -> tuple[str, bool]:
    """The enforceable version of a grammar in llguidance's Lark, and True if a schema in it may take long."""
    counts = [int(digits[:20]) for match in _COUNT.finditer(grammar) for digits in match.groups("0")]
    largest = max(repetitions(grammar), *counts, 0)
    if largest > MOST_REPETITIONS:
        raise GrammarError("grammar", f"repeats something {largest} times, expected at most {MOST_REPETITIONS}")
    parts, at, laborious = [], 0, False
    for piece in _PIECE.finditer(grammar):
        if not piece[0].startswith("%json") or piece.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, piece.end())
        except ValueError as error:
            raise GrammarError("grammar", f"has invalid JSON after %json: {error}") from error
        laborious |= check_schema(schema)
        if isinstance(schema, dict):
            schema = {**enforceable(schema), "x-guidance": options(compact)}
        parts += [grammar[at : piece.end()], json.dumps(schema)]
        at = end
    return "".join([*parts, grammar[at:]]), laborious


def _plain_text(value: str, name: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(name, f"is not valid Unicode: character {error.start} is a lone surrogate") from error
    return value


_READ: dict[str, Callable[[Any, str], str]] = {
    "json_schema": schema_text,
    "regex": _plain_text,
    "grammar": _plain_text,
    "choice": lambda texts, _: json.dumps(
        list(dict.fromkeys(_plain_text(text, "an entry of choice") for text in texts))
    ),
}
