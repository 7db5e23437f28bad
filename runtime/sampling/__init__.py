"""From logits to the next token: greedy, temperature, top-k, top-p and min-p, on the host, per request.

The steps run in the order of transformers and vLLM: temperature, top-k, top-p, min-p. Three promises shape the code:

* *Exact.* No step is approximated. Arithmetic is float32 over the vocabulary, with sums carried on in float64: a
  token's probability is right to about 1e-5 of itself, and only a token whose distance from the edge of the nucleus is
  below about 1e-6 of the total mass may fall on the other side of it. Tokens equally probable, to what float32 can
  tell, stay or go together.
* *Reproducible.* Randomness is a function of (seed, position, draw), not a stream, so a request's tokens do not depend
  on the batch it shares nor on how its steps are grouped. (Other CPUs and numpy versions round otherwise.)
* *Fast.* Sorting 150,000 logits takes 10 ms. Top-k needs a sort of a few candidates only, top-p none at all: see
  :class:`RandomSampler`.
"""

import difflib
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmc.bundle import Generation
from llmc.errors import RequestError, UsageError

Logits = npt.NDArray[np.float32]

_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_TUPLES = ("stop", "stop_token_ids")
_UINT64_MAX = 2**64 - 1

# ------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens, and when it ends.

    Names and meanings are those of transformers' ``GenerationConfig`` and vLLM's ``SamplingParams``.

    Args:
        max_tokens: new tokens at most, from 1.
        temperature: divides the logits; any finite number from 0. 0 is greedy: the most probable token, always.
        top_k: keep the k most probable tokens and their equals; 0 keeps all.
        top_p: keep a token if those strictly more probable hold less than this mass, above 0 and up to 1 (keeps all).
            Holtzman et al., The Curious Case of Neural Text Degeneration, https://arxiv.org/abs/1904.09751
        min_p: keep tokens at least this many times as probable as the most probable one, from 0 (keeps all) to 1.
            Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
        seed: from 0 to 2**64 - 1; None takes one from the operating system, reported as ``sampler.seed``.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, beside the checkpoint's end-of-sequence tokens.
        ignore_eos: go on after the checkpoint's end-of-sequence tokens.

    Raises:
        UsageError: a value is out of its range or of another type.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, "an integer of at least 1", _is_integer(self.max_tokens, 1))
        _require("temperature", self.temperature, "a number of at least 0", _is_number(self.temperature, 0.0))
        _require("top_k", self.top_k, "an integer of at least 0 (0 keeps all)", _is_integer(self.top_k, 0))
        in_range = _is_number(self.top_p, 0.0, 1.0) and self.top_p > 0
        _require("top_p", self.top_p, "a number above 0 and at most 1", in_range)
        _require("min_p", self.min_p, "a number from 0 to 1", _is_number(self.min_p, 0.0, 1.0))
        seed_fits = self.seed is None or _is_integer(self.seed, 0, _UINT64_MAX)
        _require("seed", self.seed, "an integer from 0 to 2**64 - 1, or None", seed_fits)
        _require("stop", self.stop, "a tuple of non-empty strings", _is_tuple(self.stop, _is_text))
        ids = _is_tuple(self.stop_token_ids, lambda token: _is_integer(token, 0))
        _require("stop_token_ids", self.stop_token_ids, "a tuple of token ids", ids)
        _require("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool))

    @classmethod
    def from_defaults(cls, generation: Generation, **overrides: Any) -> "SamplingParams":
        """Take the checkpoint's defaults for what the caller leaves out or sets to None.

        A checkpoint with ``do_sample`` false is greedy unless the caller names a temperature, top_k, top_p or min_p.
        ``stop`` may be one string, and ``stop`` and ``stop_token_ids`` any list or tuple.

        Raises:
            UsageError: a name is unknown, or a value is out of its range.
        """
        _refuse_unknown(overrides, [field.name for field in fields(cls)])
        given = {name: value for name, value in overrides.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        given |= {name: tuple(given[name]) for name in _TUPLES if isinstance(given.get(name), list)}
        return cls(**{**_checkpoint_defaults(generation, given), **given})


def _checkpoint_defaults(generation: Generation, given: dict[str, Any]) -> dict[str, Any]:
    if not generation.do_sample and not given.keys() & set(_FILTERS):
        return {"temperature": 0.0}
    defaults = {name: getattr(generation, name) for name in _FILTERS}
    return {name: value for name, value in defaults.items() if value is not None}


def _refuse_unknown(overrides: dict[str, Any], known: list[str]) -> None:
    for name in overrides.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        raise UsageError(f"unknown sampling parameter {name!r}; {hint}")


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise UsageError(f"{name} is {value!r}, expected {expected}")


def _is_tuple(value: object, is_item: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(is_item(item) for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and low <= value <= high


# ------------------------------------------------------------------------------------------------------- randomness

_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int, draw: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but its arguments (each from 0 to 2**64 - 1).

    The arguments are hashed one after the other by the output function of splitmix64 (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, OOPSLA 2014; constants of https://prng.di.unimi.it/splitmix64.c).
    """
    return (_mix(_mix(_mix(seed) ^ position) ^ draw) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    """One step of splitmix64 from ``state``: a bijection of 64 bits that scatters neighbours."""
    state = (state + _GOLDEN) & _UINT64_MAX
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MAX
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64_MAX
    return state ^ (state >> 31)


def _uniforms(seed: int, position: int) -> Iterator[float]:
    draw = 0
    while True:
        yield uniform(seed, position, draw)
        draw += 1


def _pick(cumulative: npt.NDArray[np.float64], point: float) -> int:
    """Index of the interval of ``cumulative`` that ``point`` (in [0, 1)) of its total falls into; never empty."""
    total = float(cumulative[-1])
    return int(cumulative.searchsorted(min(point * total, math.nextafter(total, 0.0)), side="right"))


# --------------------------------------------------------------------------------------------------------- samplers


class Sampler(Protocol):
    """Chooses the tokens of one request. Use it from one thread at a time: it owns scratch memory."""

    @property
    def seed(self) -> int | None:
        """What makes the draws repeatable; None for a sampler that draws nothing."""

    def __call__(self, logits: Logits, position: int) -> int:
        """The token for ``position`` of the sequence, from ``logits`` (float32 [V], left as they are).

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        """The distribution that is drawn from, float32 [V]; sorts the vocabulary, so it is slow.

        Raises:
            RequestError: as when called.
        """


def make_sampler(params: SamplingParams, vocab_size: int) -> Sampler:
    """The sampler for a request's parameters; ``vocab_size`` is the length of the logits it will see."""
    return GreedySampler() if params.temperature == 0 else RandomSampler(params, vocab_size)


class GreedySampler:
    """The most probable token; of several, the one with the lowest id."""

    seed: int | None = None

    def __call__(self, logits: Logits, position: int) -> int:
        token = int(logits.argmax())  # NaN counts as the largest
        _check_peak(float(logits[token]))
        return token

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        result = np.zeros(logits.shape, np.float32)
        result[self(logits, 0)] = 1.0
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
        self._masses = _Masses(0 if self._uses_top_k else vocab_size)

    def __call__(self, logits: Logits, position: int) -> int:
        assert logits.shape == (self._vocab_size,) and logits.dtype == np.float32
        uniforms = _uniforms(self.seed, position)
        if not self._uses_top_k:
            self._masses.fill(logits, self._params.temperature)
            return self._draw(uniforms)
        tokens, weights = self._support(logits)
        return int(tokens[_pick(np.add.accumulate(weights), next(uniforms))])

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float32]:
        tokens, weights = self._support(logits)
        result = np.zeros(logits.shape, np.float32)
        result[tokens] = weights / weights.sum()
        return result

    def _draw(self, uniforms: Iterator[float]) -> int:
        masses, params = self._masses, self._params
        floor = np.float32(params.min_p * masses.peak()) if params.min_p else np.float32(0)
        # A token is in the nucleus if it and the tokens no more probable than it hold more than this.
        missing = (1.0 - params.top_p) * masses.total
        while True:
            token, weight = masses.pick(next(uniforms), next(uniforms))
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
        weights = np.exp((values - values[0]) * _inverse(self._params.temperature))
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
    _check_peak(float(maxima.max()))
    bound = np.partition(maxima, maxima.size - k)[maxima.size - k]
    candidates: npt.NDArray[np.intp] = np.flatnonzero(logits >= bound)
    values = logits[candidates]
    smallest = np.partition(values, values.size - k)[values.size - k]
    return np.compress(values >= smallest, candidates)


def _inverse(temperature: float) -> float:
    """1 / temperature, within what float32 can multiply differences of logits by without making NaN."""
    return min(max(1.0 / temperature, 1e-30), 1e30)


def _check_peak(peak: float) -> None:
    if not math.isfinite(peak):
        what = "hold NaN" if math.isnan(peak) else "hold +inf" if peak > 0 else "are all -inf"
        raise RequestError(
            f"the model's logits {what}, so no token can be chosen; check the bundle with: llmc verify BUNDLE"
        )


# ----------------------------------------------------------------------------------------------------------- masses


def _fast_exponential() -> tuple[np.ufunc, float]:
    """The faster of exp and exp2 in float32, and the natural logarithm of its base.

    On AVX-512, numpy's exp2 takes half the time of its exp; elsewhere exp2 is a scalar loop.
    """
    if hasattr(np.lib, "introspect"):
        found = np.lib.introspect.opt_func_info(func_name="^exp2$", signature="float32")
        if found and not any(loop["current"].startswith("baseline") for loop in found["exp2"].values()):
            return np.exp2, math.log(2.0)
    return np.exp, 1.0


class _Masses:
    """Unnormalised probabilities of a vocabulary, with the sums that make drawing and removing cheap.

    Tokens lie in a grid [slabs, rows, columns], in which sums add up whole rows, fast. A draw first finds a column,
    that is all tokens some multiple of ``columns`` apart, then a place in it. Slabs let a removal stop early. The last
    places of the grid are padding and stay 0.
    """

    _SLABS, _ROWS = 8, 32
    _EXPONENTIAL, _LOG_BASE = _fast_exponential()
    # Weights need no common factor if their total lies between these: float32 then holds all that matters.
    _TOTALS = (2.0**-60, 2.0**120)
    # Natural logarithms outside of which vector exponentials fall back to slow code, or overflow.
    _LOGARITHMS = (-87.0, 83.0)

    def __init__(self, vocab_size: int) -> None:
        columns = -(-vocab_size // (self._SLABS * self._ROWS))
        self._columns = max(1, -(-columns // 16)) * 16  # whole vectors in every row sum a third faster
        self._grid = np.zeros((self._SLABS, self._ROWS, self._columns), np.float32)
        self._by_column = self._grid.reshape(-1, self._columns)
        self._flat = self._grid.reshape(-1)[:vocab_size]
        self._sums = np.zeros((self._SLABS, self._columns), np.float32)
        self._above = np.zeros((self._ROWS, self._columns), np.bool_)
        self._cumulative = np.zeros(self._columns, np.float64)

    @property
    def total(self) -> float:
        return float(self._cumulative[-1])

    def peak(self) -> float:
        return float(self._flat.max())

    def fill(self, logits: Logits, temperature: float) -> None:
        """Set every weight to exp(logit / temperature), times a common factor where float32 needs one.

        Raises:
            RequestError: the logits hold NaN or +inf, or nothing but -inf.
        """
        scale = _inverse(temperature)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._look_moderate(logits, scale):
                np.multiply(logits, np.float32(scale / self._LOG_BASE), out=self._flat)
                self._EXPONENTIAL(self._flat, out=self._flat)
                self._sum()
                if self._TOTALS[0] < self.total < self._TOTALS[1]:
                    return
            peak = logits.max()
            _check_peak(float(peak))
            np.subtract(logits, peak, out=self._flat)
            np.multiply(self._flat, np.float32(scale), out=self._flat)
            np.exp(self._flat, out=self._flat)
            self._sum()

    def _look_moderate(self, logits: Logits, scale: float) -> bool:
        """Guess cheaply whether no common factor is needed; a wrong guess costs time and nothing else."""
        lowest, highest = self._LOGARITHMS
        if not float(logits[::61].min()) * scale > lowest:
            return False
        return scale < 2.0 or float(logits.max()) * scale < highest

    def pick(self, first: float, second: float) -> tuple[int, np.float32]:
        """A token drawn in proportion to its weight, and the weight; two uniform numbers find its column and row."""
        column = _pick(self._cumulative, first)
        row = _pick(np.add.accumulate(self._by_column[:, column], dtype=np.float64), second)
        token = row * self._columns + column
        return token, self._flat[token]

    def remove(self, pivot: np.float32, enough: float) -> float:
        """Set weights up to ``pivot`` to 0 and return their mass, stopping halfway once it exceeds ``enough``."""
        removed = 0.0
        for weights, sums in zip(self._grid, self._sums, strict=True):
            before = float(np.add.reduce(sums))
            np.greater(weights, pivot, out=self._above)
            np.multiply(weights, self._above, out=weights)
            np.add.reduce(weights, axis=0, out=sums)
            removed += before - float(np.add.reduce(sums))
            if removed > enough:
                return removed
        self._accumulate()
        return removed

    def _sum(self) -> None:
        np.add.reduce(self._grid, axis=1, out=self._sums)
        self._accumulate()

    def _accumulate(self) -> None:
        np.add.accumulate(np.add.reduce(self._sums, axis=0), dtype=np.float64, out=self._cumulative)
