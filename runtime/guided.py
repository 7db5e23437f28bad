"""Guided decoding: output that follows a JSON schema, a regular expression, a grammar or a list of choices.

A grammar becomes a mask over the vocabulary at every step (https://github.com/guidance-ai/llguidance; the approach of
Willard and Louf, Efficient Guided Generation for Large Language Models, https://arxiv.org/abs/2307.09702). It fails
closed: what cannot be enforced is refused, and a guide that cannot go on raises. The library alone would not do: after
an error its masks allow the end of the sequence, and unknown keywords of a schema go unnoticed.

What is constrained is the text of the tokens. Where only one text can come next, only the tokens that the tokenizer
would make of it are allowed; elsewhere, every token whose text fits. A tokenizer whose decoder drops a space at the
start of a text (Llama 2) also drops it from guided output. An output cut off by ``max_tokens`` is the beginning of one
that follows the grammar, and a grammar that recurses without an end is followed until then.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.errors import GrammarError, ResourceError, UsageError, require
from llmc.runtime.gbnf import without_long_escapes
from llmc.runtime.json_schema import LONGEST_REGEX, check_schema, schema_text
from llmc.runtime.tokenizer import Tokenizer, return_freed_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Logits = npt.NDArray[np.float32]
_Bits = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")

# Characters at most.
_LONGEST = {"json_schema": 256 * 1024, "regex": LONGEST_REGEX, "grammar": 64 * 1024, "choice": 64 * 1024}
# The library recurses over references and rules: a thread's default stack (8 MiB; 512 KiB on macOS) overflows at some
# hundreds of them and takes the process down. The longest inputs above need 40 MiB. Unused pages cost no memory.
_STACK_BYTES = 64 * 1024 * 1024
_STACK_SIZE_LOCK = threading.Lock()
# About 2 kB each, kept for as long as a grammar is cached.
_MOST_LEXER_STATES = 20_000
_MOST_GRAMMARS = 64
# One spelling for each character: with \u0061 for "a", a model could repeat a property under a name that the schema's
# rules for "a" miss. Control characters without a short escape are thereby left out.
_JSON_OPTIONS: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": '"\\bfnrt',
    # Bounded, since models at a loss write blanks without end; a line break and an indentation of 31 fit.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
}
_REASON_LENGTH = 300


class GuidedParams(Protocol):
    """What a request says about the form of its output; at most one of the four is not None."""

    @property
    def json_schema(self) -> Mapping[str, Any] | str | None:
        """A JSON Schema, as an object or as JSON text."""

    @property
    def regex(self) -> str | None:
        """A regular expression that the whole output matches, without look-around and back-references.

        In the syntax of Rust's regex crate, whose classes such as ``\\w`` and ``\\d`` are those of Unicode.
        """

    @property
    def grammar(self) -> str | None:
        """A grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (rules written with ``::=``)."""

    @property
    def choice(self) -> Sequence[str] | None:
        """Texts of which the output is one."""


class Guide(Protocol):
    """Where one sequence stands in its grammar. Use it from one thread at a time."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing but the end of the sequence may follow."""

    def mask(self, logits: Logits) -> Logits:
        """``logits`` (float32 [V], left as they are) with -inf where the grammar forbids the token.

        The result is the guide's own memory, valid until the next call.

        Raises:
            GrammarError: no token is allowed, or the grammar became too complex to follow.
        """

    def accept(self, token: int) -> None:
        """Go on by one token.

        Raises:
            GrammarError: the token is not allowed here; the guide stays where it was.
        """

    def forced(self) -> list[int]:
        """Tokens of the only text that can come next, often none: drafts of which the first is sure to be accepted."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens, from 0 to as many as were accepted.

        Raises:
            UsageError: ``count`` is out of range.
        """

    def fork(self) -> "Guide":
        """Another guide at the same place, independent from here on."""


class Grammars:
    """Compiles the grammars of one model's requests, and keeps the last 64 of them. Safe to share between threads.

    Nothing is loaded before the first guide is asked for; the vocabulary is then read once (about a second for
    150,000 tokens).

    Args:
        tokenizer: of the model.
        vocab_size: length of the model's logits. Ids without a token in the tokenizer are never allowed.
        eos_token_ids: tokens that end an output; all are allowed where it is complete, and nowhere else.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[_Source, _Compiled] = OrderedDict()

    def guide(self, params: GuidedParams) -> Guide | None:
        """A guide at the start of the output that ``params`` asks for; None if they ask for no form.

        Of equal choices one counts.

        Raises:
            UsageError: more than one form is asked for, or a value is of the wrong type or empty.
            GrammarError: the grammar is invalid, too complex, uses what cannot be enforced, or allows no token.
            MissingExtraError: llguidance is not installed.
        """
        source = _Source.of(params)
        return None if source is None else _GrammarGuide(self._compile(source))

    def _compile(self, source: "_Source") -> "_Compiled":
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
                return self._compiled[source]
            vocabulary = self._vocabulary
        compiled = _Compiled(source, vocabulary)  # outside of the lock: it may take a second
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    @cached_property
    def _vocabulary(self) -> "_Vocabulary":
        return _Vocabulary.load(self._tokenizer, self._vocab_size, self._eos_token_ids)


# ---------------------------------------------------------------------------------------------------------- grammars


@dataclass(frozen=True)
class _Source:
    """What a request wrote: the name of its parameter, and a text that tells it from others."""

    kind: str
    text: str

    @classmethod
    def of(cls, params: GuidedParams) -> "_Source | None":
        given = [kind for kind in _READ if getattr(params, kind) is not None]
        if not given:
            return None
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given together; an output can have one form, so leave one")
        kind = given[0]
        text = _READ[kind](getattr(params, kind), kind)
        if len(text) > _LONGEST[kind]:
            raise GrammarError(f"{kind} has {len(text)} characters, expected at most {_LONGEST[kind]}")
        return cls(kind, text)

    def compile(self, vocabulary: "_Vocabulary") -> str:
        """The grammar in the library's own format.

        Raises:
            GrammarError: it uses what cannot be enforced.
        """
        library = require("llguidance", "guided")
        if self.kind == "choice":
            return str(library.LLMatcher.grammar_from_lark(self._choice_grammar(vocabulary)))
        try:
            if self.kind == "json_schema":
                check_schema(json.loads(self.text))
                return str(library.LLMatcher.grammar_from_json_schema(self.text, overrides=_JSON_OPTIONS))
            return str(library.grammar_from(self.kind, without_long_escapes(self.kind, self.text)))
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{self.kind} cannot be read: {_shortened(str(error))}") from error

    def _choice_grammar(self, vocabulary: "_Vocabulary") -> str:
        choices = json.loads(self.text)
        for choice in choices:
            vocabulary.check_spelling(choice)
        # One terminal, which the lexer follows in a table, instead of a rule with many.
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return f"start: CHOICE\nCHOICE: {literals}\n"


def _plain_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {type(value).__name__}, expected str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid Unicode: character {error.start} is a lone surrogate") from error
    return value


def _choice_text(value: object, name: str) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{name} is {type(value).__name__}, expected a tuple of texts")
    choices = list(dict.fromkeys(_plain_text(item, "an entry of choice") for item in value))
    if not choices or "" in choices:
        raise UsageError(f"{name} is {_shortened(repr(value))}, expected one or more texts, none of them empty")
    return json.dumps(choices)


_READ = {"json_schema": schema_text, "regex": _plain_text, "grammar": _plain_text, "choice": _choice_text}


def _shortened(text: str) -> str:
    """The reason in an error message of the library, without the state and the source that follow it."""
    for end in ("<state>", "<non-verbose/>", "⟦"):
        text = text.partition(end)[0]
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + "..."


# ---------------------------------------------------------------------------------------------------- compiled forms


class _Compiled:
    """A grammar that compiles and allows a first token; copies of its matcher are cheap."""

    def __init__(self, source: _Source, vocabulary: "_Vocabulary") -> None:
        self.kind = source.kind
        self.vocabulary = vocabulary
        self._grammar = source.compile(vocabulary)
        self._pristine = self._build()
        _GrammarGuide(self).allowed()

    def start(self) -> "LLMatcher":
        return self._pristine.deep_copy()

    def renew(self) -> "LLMatcher":
        """A matcher as from :meth:`start`, whose lexer forgot what it met in all requests so far."""
        self._pristine = self._build()
        return self.start()

    def _build(self) -> "LLMatcher":
        library = require("llguidance", "guided")
        build, tokens, grammar = library.LLMatcher, self.vocabulary.tokens, self._grammar
        limits: LLParserLimits = library.LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
        # Only this check tells of warnings, and a warning means that something is not enforced.
        _, complaints = _on_deep_stack(lambda: build.validate_grammar_with_warnings(grammar, tokens, limits=limits))
        if complaints:
            raise GrammarError(f"{self.kind} cannot be enforced: {_shortened(complaints[0])}")
        matcher: LLMatcher = _on_deep_stack(lambda: build(tokens, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            raise self.failure(matcher)
        return matcher

    def failure(self, matcher: "LLMatcher") -> GrammarError:
        reason = _shortened(matcher.get_error())
        if reason in ("", "NoExtension", "NoExtensionBias"):
            reason = "it allows no text"
        return GrammarError(f"{self.kind} cannot be followed: {reason}")


def _on_deep_stack(function: Callable[[], _Result]) -> _Result:
    with ThreadPoolExecutor(1, "llmc-grammar") as pool:
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(_STACK_BYTES)
            try:
                result = pool.submit(function)
            except RuntimeError as error:
                raise ResourceError(f"no thread with a stack of {_STACK_BYTES} bytes can start: {error}") from error
            finally:
                threading.stack_size(before)
        return result.result()


# -------------------------------------------------------------------------------------------------------- vocabulary


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens that a model can write.

    Args:
        tokens: the library's view of the tokenizer, which may have more ids than the model or fewer.
        size: length of the model's logits, V.
        eos_token_ids: those of the model that have a token, at least one.
        eos: the same as bits (token i is bit i % 8 of byte i // 8).
        writable: all other ids that have a token, as bits.
    """

    tokens: "LLTokenizer"
    size: int
    eos_token_ids: tuple[int, ...]
    eos: _Bits
    writable: _Bits

    @classmethod
    def load(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> "_Vocabulary":
        library = require("llguidance", "guided")
        backend = tokenizer._backend
        ids = np.fromiter(backend.get_vocab(with_added_tokens=True).values(), np.int64)
        exists = np.zeros(max(vocab_size, int(ids.max(initial=-1)) + 1), np.bool_)
        exists[ids] = True
        known = tuple(token for token in eos_token_ids if 0 <= token < vocab_size and exists[token])
        if not known:
            raise GrammarError(
                f"none of the model's end-of-sequence tokens {list(eos_token_ids)} is in its tokenizer; a guided "
                "output needs one to end with"
            )
        try:
            tokens = library.LLTokenizer(backend.to_str(), n_vocab=exists.size, eos_token=list(known))
        except ValueError as error:
            raise GrammarError(f"guided decoding does not support the tokenizer: {_shortened(str(error))}") from error
        return_freed_memory()
        eos = np.zeros(vocab_size, np.bool_)
        eos[list(known)] = True
        writable = exists[:vocab_size] & ~eos
        return cls(tokens, vocab_size, known, *(np.packbits(flags, bitorder="little") for flags in (eos, writable)))

    @cached_property
    def spellings(self) -> frozenset[bytes]:
        """The texts of all tokens that the model can write."""
        ids: list[int] = np.flatnonzero(np.unpackbits(self.writable, bitorder="little")).tolist()
        return frozenset(self.tokens.decode_bytes([token]) for token in ids if not self.tokens.is_special_token(token))

    @cached_property
    def longest_spelling(self) -> int:
        return max(map(len, self.spellings), default=0)

    def check_spelling(self, text: str) -> None:
        """Refuse a text that no sequence of tokens spells.

        Raises:
            GrammarError: there is none.
        """
        content = text.encode()
        reached = [True] + [False] * len(content)
        for end in range(1, len(content) + 1):
            starts = range(max(0, end - self.longest_spelling), end)
            reached[end] = any(reached[start] and content[start:end] in self.spellings for start in starts)
        if not reached[-1]:
            raise GrammarError(f"choice: no tokens of the model's vocabulary spell {_shortened(repr(text))}")


# ------------------------------------------------------------------------------------------------------------- guide

# What to add to the logits of eight tokens, by the byte that allows or forbids them.
_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES: Logits = np.where(_FLAGS, np.float32(0), np.float32(-np.inf))


class _GrammarGuide:
    """See :class:`Guide`.

    Copies of a matcher share the lexer's states, whose number is limited. What one request used up must not end
    another, so a matcher that fails is built anew once and led through the accepted tokens again.
    """

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.start()
        self._accepted: list[int] = []
        self._ended = False
        self._allowed: _Bits | None = None
        self._penalties: Logits | None = None

    @property
    def finished(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and self._accepts_end())

    def mask(self, logits: Logits) -> Logits:
        allowed = self.allowed()
        assert logits.shape == (self._compiled.vocabulary.size,) and logits.dtype == np.float32
        if self._penalties is None:
            self._penalties = np.empty((allowed.size, 8), np.float32)
        # Ten times as fast on 150,000 tokens as selecting by a Boolean array, whose branches are hard to predict.
        np.take(_PENALTIES, allowed, axis=0, out=self._penalties, mode="clip")
        masked = self._penalties.reshape(-1)[: logits.size]
        with np.errstate(invalid="ignore"):  # a logit of +inf becomes NaN, which samplers refuse as well
            return np.add(logits, masked, out=masked)

    def allowed(self) -> _Bits:
        """Which tokens may come next: token i by bit i % 8 of byte i // 8.

        Raises:
            GrammarError: as :meth:`mask`.
        """
        if self._allowed is None:
            self._allowed = self._next_allowed()
        return self._allowed

    def accept(self, token: int) -> None:
        vocabulary = self._compiled.vocabulary
        if not 0 <= token < vocabulary.size or self._ended or not self.allowed()[token // 8] >> token % 8 & 1:
            where = "after its end" if self._ended else f"after {len(self._accepted)} tokens"
            raise GrammarError(f"token {token} is not allowed {where} by {self._compiled.kind}; choose under the mask")
        if token in vocabulary.eos_token_ids:
            self._ended = True
        else:
            self._advance(token)
        self._allowed = None

    def forced(self) -> list[int]:
        if self._ended or self._matcher.is_stopped():
            return []
        tokens = self._matcher.compute_ff_tokens()
        size, eos = self._compiled.vocabulary.size, self._compiled.vocabulary.eos_token_ids
        usable = next((i for i, token in enumerate(tokens) if token >= size or token in eos), len(tokens))
        return tokens[: self._matcher.validate_tokens(tokens[:usable])]

    def rollback(self, count: int) -> None:
        length = len(self._accepted) + self._ended
        if not 0 <= count <= length:
            raise UsageError(f"cannot take back {count} tokens of {length}")
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            del self._accepted[-count:]
            if not self._matcher.rollback(count):
                self._renew()
        self._allowed = None

    def fork(self) -> "_GrammarGuide":
        copy = _GrammarGuide(self._compiled)
        copy._matcher = self._matcher.deep_copy()
        copy._accepted = list(self._accepted)
        copy._ended = self._ended
        return copy

    def _next_allowed(self) -> _Bits:
        vocabulary = self._compiled.vocabulary
        if self._ended:
            return vocabulary.eos
        found = np.frombuffer(self._next_bits(), np.uint8)[: vocabulary.writable.size]
        allowed = found & vocabulary.writable
        if self._accepts_end():
            allowed |= vocabulary.eos
        if not allowed.any():
            raise GrammarError(
                f"{self._compiled.kind} allows no token of the vocabulary after {len(self._accepted)} tokens; no text "
                "fits, or none that the tokenizer can write"
            )
        return allowed

    def _next_bits(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._recover()
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._compiled.failure(self._matcher)
        return bits

    def _accepts_end(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    def _advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._recover()
            if not self._matcher.consume_token(token):
                raise self._compiled.failure(self._matcher)
        self._accepted.append(token)

    def _recover(self) -> None:
        if "lexer" not in self._matcher.get_error():  # the rest is not shared, so the request itself is to blame
            raise self._compiled.failure(self._matcher)
        self._renew()

    def _renew(self) -> None:
        self._matcher = self._compiled.renew()
        if self._accepted and not self._matcher.consume_tokens(self._accepted):
            raise self._compiled.failure(self._matcher)
