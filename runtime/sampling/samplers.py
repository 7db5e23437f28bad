"""Samplers: from the logits of one position to the token chosen there."""

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llmc.errors import RequestError
from llmc.runtime.sampling.draws import pick, uniform
from llmc.runtime.sampling.logits import Logits, check_peak, weigh
from llmc.runtime.sampling.logprobs import TokenLogprobs, candidate_logprobs, token_logprobs
from llmc.runtime.sampling.mirostat import Mirostat
from llmc.runtime.sampling.processors import (
    CLOSING,
    CUTS,
    OPEN,
    PROCESSORS,
    Cut,
    Guide,
    Processor,
    SamplingContext,
    build,
)
from llmc.runtime.sampling.ranked import Ranked
from llmc.runtime.sampling.truncation import Candidates, Tokens, UndecidedError


class Choice(NamedTuple):
    """A token and, if the request asked for them, the log-probabilities at its position."""

    token: int
    logprobs: TokenLogprobs | None = None


def make_sampler(context: SamplingContext, index: int = 0) -> "Sampler":
    """The sampler of a request's sequence number ``index``, which draws with seed + index, modulo 2**64."""
    params = context.params
    top = 0 if params.logprobs is None and params.best_of is not None else params.logprobs
    if params.temperature == 0:
        return Sampler(build(PROCESSORS, context), {}, None, context.guide, top)
    seed = secrets.randbits(64) if params.seed is None else (params.seed + index) % 2**64
    context = replace(context, seed=seed)
    return Sampler(build(PROCESSORS, context), build(CUTS, context), seed, context.guide, top)


class Sampler:
    """Chooses the tokens of one request. Use it from one thread at a time: it keeps state between tokens.

    Args:
        processors, cuts: by name, in order.
        seed: of the draws; None takes the most probable token, ties by lowest id.
        guide: receives every token chosen.
        top: how many of the most probable tokens to report; None reports no log-probabilities.
    """

    def __init__(
        self,
        processors: Mapping[str, Processor],
        cuts: Mapping[str, Cut],
        seed: int | None,
        guide: Guide | None,
        top: int | None,
    ) -> None:
        self._processors, self._cuts = processors, cuts
        self._mirostat = next((cut for cut in cuts.values() if isinstance(cut, Mirostat)), None)
        self._guide, self._top = guide, top
        self.seed = seed
        self.takes_ranked = not processors and (seed is None or not CLOSING.isdisjoint(cuts))
        """True if the most probable tokens may decide; processors and other cuts need all logits."""

    def __call__(self, logits: Logits | Ranked, tokens: Sequence[int]) -> Choice:
        """The token that follows ``tokens`` (prompt and output), from ``logits`` (float32 [V], not changed).

        Call it once for each token, in order, with the tokens chosen before.

        Raises:
            NonFiniteError: the logits hold NaN or +inf, or nothing but -inf.
            RequestError: no token is allowed.
            GrammarError: the guide allows no token.
            ProcessorError: a processor of the request raised, or did not return logits.
        """
        if isinstance(logits, Ranked):
            with suppress(UndecidedError):
                return self._choose_ranked(logits, len(tokens))
            logits = logits.whole()
        processed = self._process(logits, tokens)
        if self.seed is None:
            token = int(processed.argmax())
        else:
            token = self._draw(Candidates(_every_token(logits.size), processed), len(tokens), self.seed)
        if self._guide is not None:
            self._guide.accept(token)
        return Choice(token, None if self._top is None else token_logprobs(logits, token, self._top))

    def _choose_ranked(self, ranked: Ranked, position: int) -> Choice:
        """The choice that the whole row would give. Raises UndecidedError: only the whole row can decide."""
        if not self.takes_ranked:
            raise UndecidedError
        token = ranked.best() if self.seed is None else self._draw(ranked.candidates(), position, self.seed)
        return Choice(token, None if self._top is None else candidate_logprobs(ranked, token, self._top))

    def _draw(self, candidates: Candidates, position: int, seed: int) -> int:
        for name, cut in self._cuts.items():
            if candidates.rest is not None and name not in OPEN:
                raise UndecidedError
            candidates = cut(candidates, position)
        if candidates.rest is not None:
            raise UndecidedError
        index = pick(weigh(candidates.logits), uniform(seed, position, 0))
        if self._mirostat is not None:
            self._mirostat.observe(index)
        return int(candidates.tokens[index])

    def _process(self, logits: Logits, tokens: Sequence[int]) -> Logits:
        current = logits.copy() if self._processors else logits
        for step in self._processors.values():
            current = step(tokens, current)
        peak = float(current.max())
        if not math.isfinite(peak):
            check_peak(float(logits.max()))  # the model's logits are at fault, not a step
            what = "leave no token" if peak < 0 else "turn logits into NaN or +inf"
            raise RequestError(f"{', '.join(self._processors)} {what} at position {len(tokens)}; loosen one of them")
        return current


@lru_cache(maxsize=4)
def _every_token(vocab_size: int) -> Tokens:
    return np.arange(vocab_size)
