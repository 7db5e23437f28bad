"""Samplers: from the logits of one position to the token chosen there."""

import math
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.draws import pick, uniforms
from llmc.runtime.sampling.logprobs import TokenLogprobs
from llmc.runtime.sampling.masses import Logits, Masses, check_peak, inverse
from llmc.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Choice:
    """A token and, if the request asked for them, the log-probabilities where it was chosen."""

    token: int
    logprobs: TokenLogprobs | None = None


class Sampler(Protocol):
    """Chooses the tokens of one request. Use it from one thread at a time: it owns scratch memory."""

    @property
    def seed(self) -> int | None:
        """What makes the draws repeatable; None for a sampler that draws nothing."""

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        """The token that follows ``tokens`` (prompt and output), from ``logits`` (float32 [V], left as they are).

        Call it once for each token, in order, with the tokens chosen before.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        """The distribution that is drawn from, float32 [V]; sorts the vocabulary, so it is slow.

        Raises:
            RequestError: as when called.
        """


def make_sampler(
    params: SamplingParams,
    vocab_size: int,
    *,
    prompt_length: int,
    eos_token_ids: Collection[int] = (),
) -> Sampler:
    """The sampler for a request's parameters; ``vocab_size`` is the length of the logits it will see."""
    return GreedySampler() if params.temperature == 0 else RandomSampler(params, vocab_size)


class GreedySampler:
    """The most probable token; of several, the one with the lowest id."""

    seed: int | None = None

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        return Choice(self.choose(logits, len(tokens)))

    def choose(self, logits: Logits, position: int) -> int:
        """The token for ``position`` of the sequence."""
        token = int(logits.argmax())  # NaN counts as the largest
        check_peak(float(logits[token]))
        return token

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        result = np.zeros(logits.shape, np.float32)
        result[self.choose(logits, 0)] = 1.0
        return result


class RandomSampler:
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
        self._masses = Masses(0 if self._uses_top_k else vocab_size)

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Choice:
        return Choice(self.choose(logits, len(tokens)))

    def choose(self, logits: Logits, position: int) -> int:
        """The token for ``position`` of the sequence."""
        assert logits.shape == (self._vocab_size,) and logits.dtype == np.float32
        numbers = uniforms(self.seed, position)
        if not self._uses_top_k:
            self._masses.fill(logits, self._params.temperature)
            return self._draw(numbers)
        tokens, weights = self._support(logits)
        return int(tokens[pick(np.add.accumulate(weights), next(numbers))])

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        tokens, weights = self._support(logits)
        result = np.zeros(logits.shape, np.float32)
        result[tokens] = weights / weights.sum()
        return result

    def _draw(self, numbers: Iterator[float]) -> int:
        masses, params = self._masses, self._params
        floor = np.float32(params.min_p * masses.peak()) if params.min_p else np.float32(0)
        # A token is in the nucleus if it and the tokens no more probable than it hold more than this.
        missing = (1.0 - params.top_p) * masses.total
        while True:
            token, weight = masses.pick(next(numbers), next(numbers))
            if weight < floor:
                missing -= masses.remove(np.nextafter(floor, np.float32(0)), math.inf)
            elif weight > missing:
                return token
            else:
                missing -= masses.remove(weight, missing)
                if missing < 0 or masses.total == 0:
                    return token

    def _support(self, logits: Logits) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The tokens that may be drawn, most probable first, and their weights."""
        tokens = _top_k(logits, self._params.top_k if self._uses_top_k else logits.size)
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


def _top_k(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """Tokens whose logit is at least the k-th largest, in no particular order."""
    rows = max(1, min(128, logits.size // (2 * k)))
    columns = logits.size // rows
    blocked = logits[: rows * columns].reshape(rows, columns)  # block c: tokens c, c + columns, ...
    maxima = np.concatenate([np.maximum.reduce(blocked, axis=0), logits[rows * columns :]])
    check_peak(float(maxima.max()))
    bound = np.partition(maxima, maxima.size - k)[maxima.size - k]
    candidates: npt.NDArray[np.intp] = np.flatnonzero(logits >= bound)
    values = logits[candidates]
    smallest = np.partition(values, values.size - k)[values.size - k]
    return np.compress(values >= smallest, candidates)
