"""The steps between the model's logits and the draw, in one fixed order: :data:`PROCESSORS`, then :data:`CUTS`.

A step runs only if its parameter needs it. Biases and bans come first, as in transformers and OpenAI's servers, so that
penalties see the biased logit. Penalties follow, then the request's own processors. A grammar comes last before the
cuts: nothing after it can allow a forbidden token. Top-k is the first cut because temperature does not change it and it
leaves little work to the others, which see the distribution after temperature. XTC comes last because it removes the
most probable tokens. Mirostat replaces the other cuts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from llmc.errors import GrammarError, ProcessorError, text_of
from llmc.runtime.sampling import truncation
from llmc.runtime.sampling.draws import uniform
from llmc.runtime.sampling.dry import Breakers, Dry
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.mirostat import Mirostat
from llmc.runtime.sampling.params import GUIDES, SamplingParams
from llmc.runtime.sampling.penalties import BadWords, NoRepeatNGram, OutputPenalty, RepetitionPenalty
from llmc.runtime.sampling.truncation import Candidates

# Edits the logits of one sequence, in place or by returning a new array [V]; -inf forbids a token. Arguments: the
# tokens so far (prompt and output), and the logits of the next token.
Processor = Callable[[Sequence[int], Logits], Logits]

# XTC's draw number at a position, far from that of the token's own draw.
_XTC_DRAW = 2**63

_Step = TypeVar("_Step")


# Changes the candidates of a token at a position of the sequence.
Cut = Callable[[Candidates, int], Candidates]


class Guide(Protocol):
    """A grammar as the sampler sees it: which tokens it allows, one after the other."""

    @property
    def finished(self) -> bool:
        """True if the output is complete."""

    def mask(self, logits: Logits) -> Logits:
        """``logits`` [V] with -inf where the grammar forbids a token; the same array or a new one."""

    def accept(self, token: int) -> None:
        """Advance by the token chosen."""


@dataclass(frozen=True)
class SamplingContext:
    """Everything that the steps and the sampler of a sequence are built from.

    Args:
        vocab_size: V, the length of the logits.
        prompt_length: number of prompt tokens, which some penalties ignore.
        eos_token_ids: the checkpoint's end-of-sequence tokens.
        processors: the request's own, called in this order with (tokens so far, logits).
        guide: the request's grammar, if any; it receives every token chosen.
        breakers: DRY's, as the vocabulary's tokens spell them.
        bad_words: the token sequences that ``params.bad_words`` forbids.
        seed: of the draws; :func:`llmc.runtime.sampling.samplers.make_sampler` sets it.
        branching: calls may be for different sequences, such as beams.
    """

    params: SamplingParams
    vocab_size: int
    prompt_length: int
    eos_token_ids: Collection[int] = ()
    processors: Sequence[Processor] = ()
    guide: Guide | None = None
    breakers: Breakers | None = None
    bad_words: Sequence[Sequence[int]] = ()
    seed: int = 0
    branching: bool = False


def build(
    builders: Mapping[str, Callable[[SamplingContext], _Step | None]], context: SamplingContext
) -> dict[str, _Step]:
    """The steps of :data:`PROCESSORS` or :data:`CUTS` that the request needs, by name, in their order."""
    return {name: step for name, builder in builders.items() if (step := builder(context)) is not None}


def build_processors(context: SamplingContext) -> list[Processor]:
    """Processors for a search, which scores several sequences: calls may switch between them."""
    return list(build(PROCESSORS, replace(context, branching=True)).values())


# ------------------------------------------------------------------------------------------------------------- steps


def _logit_bias(context: SamplingContext) -> Processor | None:
    if not context.params.logit_bias:
        return None
    biased, biases = (np.array(column) for column in zip(*context.params.logit_bias, strict=True))
    added = biases.astype(np.float32)

    def add(tokens: Sequence[int], logits: Logits) -> Logits:
        logits[biased] += added
        return logits

    return add


def _bans(context: SamplingContext) -> Processor | None:
    allow, words = _allowed_tokens(context), BadWords(context.bad_words)
    if not context.bad_words:
        return allow
    return words if allow is None else lambda tokens, logits: words(tokens, allow(tokens, logits))


def _allowed_tokens(context: SamplingContext) -> Processor | None:
    params = context.params
    if params.allowed_tokens is None:
        return _ban(params.banned_tokens) if params.banned_tokens else None
    allowed = np.array(sorted(set(params.allowed_tokens) - set(params.banned_tokens)), np.int64)

    def allow(tokens: Sequence[int], logits: Logits) -> Logits:
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
        return logits

    return allow


def _ban(tokens: Collection[int], until: int | None = None) -> Processor:
    banned = np.array(sorted(set(tokens)), np.int64)

    def ban(tokens: Sequence[int], logits: Logits) -> Logits:
        if until is None or len(tokens) < until:
            logits[banned] = -np.inf
        return logits

    return ban


def _min_tokens(context: SamplingContext) -> Processor | None:
    params = context.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else context.eos_token_ids)}
    if not params.min_tokens or not ends:
        return None
    return _ban(ends, until=context.prompt_length + params.min_tokens)


def _repetition_penalty(context: SamplingContext) -> Processor | None:
    penalty = context.params.repetition_penalty
    return RepetitionPenalty(penalty, context.branching) if penalty != 1 else None


def _frequency_penalty(context: SamplingContext) -> Processor | None:
    presence, frequency = context.params.presence_penalty, context.params.frequency_penalty
    if not presence and not frequency:
        return None
    return OutputPenalty(presence, frequency, context.prompt_length, context.branching)


def _dry(context: SamplingContext) -> Processor | None:
    params = context.params
    if not params.dry_multiplier:
        return None
    return Dry(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_range,
        context.breakers,
        context.branching,
    )


def _no_repeat_ngram_size(context: SamplingContext) -> Processor | None:
    size = context.params.no_repeat_ngram_size
    return NoRepeatNGram(size, context.branching) if size else None


def _processors(context: SamplingContext) -> Processor | None:
    """The request's own processors; any exception in one becomes a ProcessorError."""
    if not context.processors:
        return None

    def process(tokens: Sequence[int], logits: Logits) -> Logits:
        if not _is_usable(logits):
            return logits
        frozen = tuple(tokens)  # not the engine's list
        for processor in context.processors:
            name = getattr(processor, "__qualname__", type(processor).__qualname__)
            where = f"the logits processor {name} at position {len(tokens)}"
            view = logits[:]  # the processor may change its shape, type and flags
            try:
                result = processor(frozen, view)
            except BaseException as error:  # SystemExit too ends the request, not the engine
                raise ProcessorError(f"{where} raised {text_of(error)}; correct it") from error
            _check_result(where, result, logits)
            if result is not view:
                np.copyto(logits, result)  # later steps write into it
        return logits

    return process


def _guide(context: SamplingContext) -> Processor | None:
    guide = context.guide
    if guide is None:
        return None
    kind = next((name for name in GUIDES if getattr(context.params, name) is not None), "reasoning_budget")

    def mask(tokens: Sequence[int], logits: Logits) -> Logits:
        if not _is_usable(logits):
            return logits
        masked = guide.mask(logits)
        if masked.max() == -np.inf:
            raise GrammarError(
                kind,
                f"leaves no token at position {len(tokens)} that the request's other settings allow",
                "loosen it, min_tokens, allowed_tokens, banned_tokens or bad_words",
            )
        return masked

    return mask


def _top_k(context: SamplingContext) -> Cut | None:
    k = context.params.top_k
    return (lambda candidates, position: candidates.keep_largest(k)) if 0 < k < context.vocab_size else None


def _temperature(context: SamplingContext) -> Cut | None:
    temperature = context.params.temperature
    if temperature == 1:
        return None
    return lambda candidates, position: candidates.scale(temperature)


def _top_p(context: SamplingContext) -> Cut | None:
    p = context.params.top_p
    return (lambda candidates, position: candidates.keep_nucleus(p)) if p != 1 else None


def _cut(
    name: str, make_mask: Callable[[Logits, float], truncation.Mask], neutral: float
) -> Callable[[SamplingContext], Cut | None]:
    """Build a cut from the parameter ``name``; the value ``neutral`` turns it off."""

    def build_cut(context: SamplingContext) -> Cut | None:
        value = getattr(context.params, name)
        if value == neutral:
            return None
        return lambda candidates, position: candidates.keep(make_mask(candidates.logits, value))

    return build_cut


def _xtc(context: SamplingContext) -> Cut | None:
    probability, threshold = context.params.xtc_probability, context.params.xtc_threshold

    def exclude(candidates: Candidates, position: int) -> Candidates:
        if uniform(context.seed, position, _XTC_DRAW) >= probability:
            return candidates
        return candidates.keep(truncation.xtc(candidates.tokens, candidates.logits, threshold, context.eos_token_ids))

    return exclude if probability else None


def _mirostat(context: SamplingContext) -> Cut | None:
    params = context.params
    if not params.mirostat:
        return None
    return Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, context.vocab_size)


PROCESSORS: dict[str, Callable[[SamplingContext], Processor | None]] = {
    "logit_bias": _logit_bias,
    "allowed_tokens": _bans,  # and banned ones, and bad words
    "min_tokens": _min_tokens,
    "repetition_penalty": _repetition_penalty,
    "frequency_penalty": _frequency_penalty,  # and presence
    "dry": _dry,
    "no_repeat_ngram_size": _no_repeat_ngram_size,
    "processors": _processors,
    "guide": _guide,
}
# The cuts; greedy requests and searches do not use them.
CUTS: dict[str, Callable[[SamplingContext], Cut | None]] = {
    "top_k": _top_k,
    "temperature": _temperature,
    "top_p": _top_p,
    "min_p": _cut("min_p", truncation.min_p, neutral=0),
    "typical_p": _cut("typical_p", truncation.typical_p, neutral=1),
    "top_n_sigma": _cut("top_n_sigma", truncation.top_n_sigma, neutral=0),
    "xtc": _xtc,
    "mirostat": _mirostat,
}
# Cuts that keep only the most probable tokens, so that the logits of the others need not be known.
CLOSING = frozenset({"top_k", "top_p", "min_p"})
OPEN = CLOSING | {"temperature"}  # and all cuts that work while further candidates are unknown


def _is_usable(logits: Logits) -> bool:
    """True if there is a token to choose; otherwise the check after the steps names the cause."""
    return bool(np.isfinite(logits.max()))


def _check_result(where: str, result: object, logits: Logits) -> None:
    if not logits.flags.writeable:
        raise ProcessorError(f"{where} made the logits read-only; leave their memory's flags as they are")
    if not isinstance(result, np.ndarray) or result.dtype != np.float32 or result.shape != logits.shape:
        returned = f"{result.dtype} {list(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
        raise ProcessorError(f"{where} returned {returned}, expected float32 {list(logits.shape)}; return the logits")
    peak = float(np.asarray(result).max())  # NaN counts as the largest
    if not np.isfinite(peak):
        returned = "NaN" if np.isnan(peak) else "+inf" if peak > 0 else "nothing but -inf"
        raise ProcessorError(
            f"{where} returned {returned}, expected at least one finite logit, and -inf to forbid tokens"
        )
