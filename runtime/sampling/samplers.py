"""Samplers: from the logits of one position to the token chosen there."""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import pick, uniform, uniforms
from llmc.runtime.sampling.logprobs import TokenLogprobs, token_logprobs, token_rank
from llmc.runtime.sampling.masses import Logits, Masses, check_peak, inverse, largest
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import FILTERS, Guide, Processor, SamplingContext, build_steps
from llmc.runtime.sampling.scratch import borrowed, masses

_FAST = ("temperature", "top_k", "top_p", "min_p")  # what RandomSampler does itself, in its order
_MANY = 8192  # candidates, above which a pass over the vocabulary in float32 beats one over them in float64


class Choice(NamedTuple):
    """A token and, if the request asked for them, the log-probabilities where it was chosen."""

    token: int
    logprobs: TokenLogprobs | None = None


class Sampler(ABC):
    """Chooses the tokens of one request. Use it from one thread at a time: what it chose before may count.

    Attributes:
        seed: of the draws, which it makes repeatable; None for a sampler that draws nothing.
        needs: number of the largest logits that decide the token, 0 for all of them: the others may be -inf, as long
            as :func:`llmc.runtime.sampling.masses.suffice` holds.
    """

    seed: int | None = None
    needs: int = 0

    @abstractmethod
    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        """The token that follows ``tokens`` (prompt and output), from ``logits`` (float32 [V], left as they are).

        Call it once for each token, in order, with the tokens chosen before.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf; or no token is allowed.
            GrammarError: the guide allows no token.
            ProcessorError: a processor of the request raised, or returned something that is no logits.
        """


class PlainSampler(Sampler):
    """Base of samplers that choose from logits as they are."""

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        return Choice(self.choose(logits, len(tokens)))

    @abstractmethod
    def choose(self, logits: Logits, position: int) -> int:
        """The token for ``position`` of the sequence, from ``logits`` (float32 [V], left as they are).

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """


def make_sampler(context: SamplingContext, index: int = 0) -> Sampler:
    """The sampler of a request's sequence number ``index``, which draws with seed + index, modulo 2**64."""
    params = context.params
    seed = secrets.randbits(64) if params.seed is None else (params.seed + index) % 2**64
    context = replace(context, seed=seed)
    steps, sampler, tail = _plan(build_steps(context), context)
    top = 0 if params.logprobs is None and params.best_of is not None else params.logprobs
    if not steps and top is None:
        return sampler
    # After a first cut to k, nothing sees more than that; a log-probability is a share of the whole.
    needs = params.top_k if top is None and steps[0][0] == "top_k" else 0
    return ProcessedSampler(steps, sampler, tail, context.guide, top, needs, trusted=not context.processors)


_Steps = list[tuple[str, Processor]]


def _plan(steps: _Steps, context: SamplingContext) -> tuple[_Steps, PlainSampler, _Steps]:
    """Steps to run, the sampler after them, and the steps that it does itself, as they would be run."""
    params, seed = context.params, context.seed
    first = next((i for i, (name, _) in enumerate(steps) if name in FILTERS), len(steps))
    head, tail = steps[:first], steps[first:]
    if params.temperature == 0:
        return head, GreedySampler(), []
    if any(name not in _FAST for name, _ in tail):
        return steps, SupportSampler(seed), []
    named = {name: getattr(params, name) for name, _ in tail}
    return head, RandomSampler(SamplingParams(**named, seed=seed), context.vocab_size), tail


class GreedySampler(PlainSampler):
    """The most probable token; of several, the one with the lowest id."""

    needs = 1

    def choose(self, logits: Logits, position: int) -> int:
        token = int(logits.argmax())  # NaN counts as the largest
        check_peak(float(logits[token]))
        return token


class RandomSampler(PlainSampler):
    """Draws from the distribution that temperature, top-k, top-p and min-p leave.

    *With top-k*: the k-th largest of many block maxima bounds the k-th largest logit from below, which leaves few
    candidates; they are sorted, and everything else is exact and easy.

    *Without*: a token is drawn from the whole distribution by inverse CDF over sums, then inside the sum drawn. It is
    kept if it belongs to the nucleus, that is if the mass of the tokens no more probable than it exceeds 1 - top_p;
    otherwise those tokens are removed and another is drawn. Drawing again what was rejected leaves the renormalised
    nucleus, exactly, and each round removes half of the excess on average. (The method of FlashInfer's sorting-free
    kernels, https://flashinfer.ai/2025/03/10/sampling.html, with array operations for threads.)
    """

    seed: int

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._params = params
        self._vocab_size = vocab_size
        self._uses_top_k = 0 < params.top_k < vocab_size
        self.needs = params.top_k if self._uses_top_k else 0

    def choose(self, logits: Logits, position: int) -> int:
        assert logits.shape == (self._vocab_size,) and logits.dtype == np.float32
        numbers = uniforms(self.seed, position)
        if not self._uses_top_k:
            filled = masses(self._vocab_size)
            filled.fill(logits, self._params.temperature)
            return self._draw(filled, numbers)
        tokens, weights = self._support(logits)
        return int(tokens[pick(np.add.accumulate(weights), next(numbers))])

    def _draw(self, filled: Masses, numbers: Iterator[float]) -> int:
        params = self._params
        floor = np.float32(params.min_p * filled.peak()) if params.min_p else np.float32(0)
        # A token is in the nucleus if it and the tokens no more probable than it hold more than this.
        missing = (1.0 - params.top_p) * filled.total
        while True:
            token, weight = filled.pick(next(numbers), next(numbers))
            if weight < floor:
                missing -= filled.remove(np.nextafter(floor, np.float32(0)), math.inf)
            elif weight > missing:
                return token
            else:
                missing -= filled.remove(weight, missing)
                if missing < 0 or filled.total == 0:
                    return token

    def _support(self, logits: Logits) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The tokens that may be drawn, most probable first, and their weights."""
        tokens = largest(logits, self._params.top_k if self._uses_top_k else logits.size)
        values = logits[tokens].astype(np.float64)
        order = np.argsort(-values, kind="stable")
        tokens, values = tokens[order], values[order]
        weights = np.exp((values - values[0]) * inverse(self._params.temperature))
        kept = np.count_nonzero(weights >= self._cutoff(weights))
        return tokens[:kept], weights[:kept]

    def _cutoff(self, weights: npt.NDArray[np.float64]) -> float:
        """The smallest of the descending ``weights`` that top-p and min-p keep; it is above 0."""
        least = max(self._params.min_p * float(weights[0]), math.ulp(0.0))
        if self._params.top_p == 1:
            return least
        cumulative = np.add.accumulate(weights)
        more_probable = cumulative - weights
        nucleus = int(more_probable.searchsorted(self._params.top_p * cumulative[-1]))
        return max(least, float(weights[max(nucleus, 1) - 1]))


class SupportSampler(PlainSampler):
    """Draws from what truncations have left, which are few tokens as a rule."""

    seed: int

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def choose(self, logits: Logits, position: int) -> int:
        possible = logits > -np.inf
        if np.count_nonzero(possible) > _MANY:
            filled = masses(logits.size)
            filled.fill(logits, 1.0)
            return filled.pick(uniform(self.seed, position, 0), uniform(self.seed, position, 1))[0]
        check_peak(float(logits.max()))
        tokens = np.flatnonzero(possible)
        values = logits[tokens].astype(np.float64)
        weights = np.exp(values - values.max())
        return int(tokens[pick(np.add.accumulate(weights), uniform(self.seed, position, 0))])


class ProcessedSampler(Sampler):
    """Runs a request's steps on a copy of the logits, then chooses.

    Args:
        steps: by name, in order.
        sampler: chooses from the logits that the steps leave.
        tail: the steps that the sampler does itself, to report the distribution that it draws from.
        guide: told every token chosen.
        top: how many of the most probable tokens to report; None reports no log-probabilities.
        needs: see :class:`Sampler`.
        trusted: true if all steps are ours; those of others may keep the logits that they see, so they see no memory
            of other requests.
    """

    def __init__(
        self,
        steps: _Steps,
        sampler: PlainSampler,
        tail: _Steps,
        guide: Guide | None,
        top: int | None,
        needs: int = 0,
        *,
        trusted: bool = False,
    ) -> None:
        self._names = [name for name, _ in steps]
        shaping = next((i for i, name in enumerate(self._names) if name in FILTERS), len(steps))
        self._processors = [step for _, step in steps[:shaping]]
        self._filters = [step for _, step in steps[shaping:]]
        self._tail = [step for _, step in tail]
        self._sampler, self._guide, self._top = sampler, guide, top
        self.seed, self.needs = sampler.seed, needs
        self._trusted = trusted
        self._own = np.empty(0, np.float32)

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        if not self._trusted and self._own.shape != logits.shape:
            self._own = np.empty_like(logits)
        with borrowed(logits.size) if self._trusted else nullcontext(self._own) as scratch:
            processed = self._run(logits, tokens, scratch)
            drawn_from = self._drawn_from(processed, tokens) if self._top is not None else None
            token = self._sampler.choose(processed, len(tokens))
            if self._guide is not None:
                self._guide.accept(token)
            return Choice(token, None if drawn_from is None else self._logprobs(logits, drawn_from, token))

    def _run(self, logits: Logits, tokens: Sequence[int], current: Logits) -> Logits:
        """The logits that the steps leave; they may work in ``current``."""
        if not self._names:
            return logits
        np.copyto(current, logits)
        for steps in (self._processors, self._filters):
            for step in steps:
                current = step(tokens, current)
            if steps:
                self._check(current, logits, len(tokens))
        return current

    def _check(self, current: Logits, logits: Logits, position: int) -> None:
        peak = float(current.max())
        if math.isfinite(peak):
            return
        check_peak(float(logits.max()))  # the model's own fault
        what = "leave no token" if peak < 0 else "turn logits into NaN or +inf"
        raise RequestError(f"{', '.join(self._names)} {what} at position {position}; loosen one of them")

    def _drawn_from(self, processed: Logits, tokens: Sequence[int]) -> Logits:
        if not self._tail:
            return processed
        current: Logits = processed.copy()
        for step in self._tail:
            current = step(tokens, current)
        return current

    def _logprobs(self, logits: Logits, drawn_from: Logits, token: int) -> TokenLogprobs:
        assert self._top is not None
        if drawn_from[token] == -np.inf:  # it lies on the edge of the nucleus, which two ways to sum see differently
            drawn_from[token] = drawn_from[drawn_from > -np.inf].min()
        logprob, top = token_logprobs(logits, token, self._top)
        rank = token_rank(logits, token, top)
        if drawn_from is logits:
            return TokenLogprobs(token, logprob, top, logprob, top, rank, rank)
        processed, most = token_logprobs(drawn_from, token, self._top)
        return TokenLogprobs(token, logprob, top, processed, most, rank, token_rank(drawn_from, token, most))
