"""Compiled grammars, and one sequence's position in its grammar."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Unfinished
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from llmc.errors import GrammarError, ResourceError
from llmc.runtime.guided.trial import Clock, try_out
from llmc.runtime.guided.vocabulary import Bits, Vocabulary, shorten_reason
from llmc.runtime.sampling.logits import Logits

if TYPE_CHECKING:
    from llguidance import LLMatcher

_Result = TypeVar("_Result")

# The library recurses over references and rules: a few hundred overflow a thread's default stack (8 MiB; 512 KiB on
# macOS) and crash the process. The longest inputs need 40 MiB. Unused pages cost no memory.
_STACK_BYTES = 64 * 1024 * 1024
_STACK_SIZE_LOCK = threading.Lock()
# About 2 kB each, for as long as a grammar is cached.
_MOST_LEXER_STATES = 20_000
# Most expressions that one step of the lexer may create: a quarter of the library's bound, with which a step took two
# seconds of the engine's thread; schemas of thousands of values stay below half of it.
_STEP_FUEL = 50_000
# A grammar that took longer to compile is not compiled again in the engine's thread, where all requests would wait.
_QUICK_SECONDS = 0.25


class CompiledGrammar:
    """A grammar that compiles and allows a first token; copies of its matcher are cheap.

    Args:
        kind: the request's parameter that holds it.
        grammar: in the library's own format.
        laborious: True to try it in another process first.
        vocabulary: of the model.
        clock: limits the time to compile.

    Raises:
        GrammarError: it cannot be enforced, allows no text or takes too long.
        DeadlineError: the request's time is over.
    """

    def __init__(self, kind: str, grammar: str, laborious: bool, vocabulary: Vocabulary, clock: Clock) -> None:
        self.kind = kind
        self.vocabulary = vocabulary
        self._grammar = grammar
        if laborious:
            try_out(kind, grammar, clock, _STACK_BYTES, _MOST_LEXER_STATES, _STEP_FUEL)
        try:
            self._pristine, took = _on_deep_stack(self._build, clock.seconds_left())
        except Unfinished as error:
            raise clock.over(kind) from error
        self._renewable = took < _QUICK_SECONDS
        GrammarGuide(self).compute_allowed()

    def start(self) -> "LLMatcher":
        return self._pristine.deep_copy()

    def renew(self) -> "LLMatcher | None":
        """A matcher with a fresh lexer, without the states of earlier requests; None if compiling takes long."""
        if not self._renewable:
            return None
        self._pristine, _ = _on_deep_stack(self._build)
        return self.start()

    def _build(self) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
        matcher = LLMatcher(self.vocabulary.tokens, self._grammar, log_level=0, limits=limits)
        # A warning means that something is not enforced.
        complaints = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if complaints:
            raise GrammarError(self.kind, f"cannot be enforced: {shorten_reason(complaints[0])}")
        return matcher

    def failure(self, matcher: "LLMatcher") -> GrammarError:
        reason = shorten_reason(matcher.get_error())
        if reason in ("", "NoExtension", "NoExtensionBias"):
            reason = "it allows no text"
        return GrammarError(self.kind, f"cannot be followed: {reason}")


def _on_deep_stack(function: Callable[[], _Result], seconds: float | None = None) -> tuple[_Result, float]:
    """The result of a deeply recursive function, and the CPU time it took, in seconds.

    Raises TimeoutError after ``seconds``; the thread goes on and its result is dropped.
    """

    def timed() -> tuple[_Result, float]:
        before = time.thread_time()
        return function(), time.thread_time() - before

    pool = ThreadPoolExecutor(1, "llmc-grammar")
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            future = pool.submit(timed)
        except RuntimeError as error:
            raise ResourceError(f"no thread with a stack of {_STACK_BYTES} bytes can start: {error}") from error
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return future.result(seconds)


# Added to the logits of eight tokens, indexed by the byte that allows or forbids them.
_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES: Logits = np.where(_FLAGS, np.float32(0), np.float32(-np.inf))


class GrammarGuide:
    """One sequence's position in its grammar. Use it from one thread at a time.

    Copies of a matcher share the lexer's limited number of states. So that one request cannot end another, a matcher
    that fails is rebuilt once and fed the accepted tokens again.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher = compiled.start()
        self._accepted: list[int] = []
        self._ended = False
        self._allowed: Bits | None = None
        self._penalties: Logits | None = None

    @property
    def finished(self) -> bool:
        """True if the output is complete and nothing but the end of the sequence may follow."""
        return self._ended or (self._matcher.is_stopped() and self._accepts_end())

    def mask(self, logits: Logits) -> Logits:
        """``logits`` (float32 [V], left as they are) with -inf where the grammar forbids the token.

        The result is the guide's own memory, valid until the next call.

        Raises:
            GrammarError: no token is allowed, or the grammar became too complex to follow.
        """
        allowed = self.compute_allowed()
        assert logits.shape == (self._compiled.vocabulary.size,) and logits.dtype == np.float32
        if self._penalties is None:
            self._penalties = np.empty((allowed.size, 8), np.float32)
        # Ten times as fast on 150,000 tokens as selecting by a Boolean array, whose branches are hard to predict.
        np.take(_PENALTIES, allowed, axis=0, out=self._penalties, mode="clip")
        masked = self._penalties.reshape(-1)[: logits.size]
        with np.errstate(invalid="ignore"):  # a logit of +inf becomes NaN, which samplers refuse as well
            return np.add(logits, masked, out=masked)

    def compute_allowed(self) -> Bits:
        """The tokens that may come next: token i by bit i % 8 of byte i // 8. GrammarError as :meth:`mask`."""
        if self._allowed is None:
            self._allowed = self._next_allowed()
        return self._allowed

    def accept(self, token: int) -> None:
        """Advance by one token. Raises GrammarError: the token is not allowed here; the guide does not advance."""
        vocabulary = self._compiled.vocabulary
        if not 0 <= token < vocabulary.size or self._ended or not self.compute_allowed()[token // 8] >> token % 8 & 1:
            where = "after its end" if self._ended else f"after {len(self._accepted)} tokens"
            raise GrammarError(self._compiled.kind, f"does not allow token {token} {where}", "choose under the mask")
        if token in vocabulary.eos_token_ids:
            self._ended = True
        else:
            self._advance(token)
        self._allowed = None

    def _next_allowed(self) -> Bits:
        vocabulary = self._compiled.vocabulary
        if self._ended:
            return vocabulary.eos
        mask = np.frombuffer(self._next_bits(), np.uint8)[: vocabulary.writable.size]
        allowed = mask & vocabulary.writable
        if self._accepts_end():
            allowed |= vocabulary.eos
        if not allowed.any():
            raise GrammarError(
                self._compiled.kind,
                f"allows no token of the vocabulary after {len(self._accepted)} tokens: no text fits, or the tokenizer "
                "cannot write one that does",
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
        """Go on with a new matcher if the shared lexer failed; raise for any other failure."""
        matcher = self._compiled.renew() if "lexer" in self._matcher.get_error() else None
        if matcher is None or (self._accepted and not matcher.consume_tokens(self._accepted)):
            raise self._compiled.failure(self._matcher)
        self._matcher = matcher
