"""A diffusion model's answer: masks in its place, of which every step makes the surest into tokens.

The rule is LLaDA's (https://arxiv.org/abs/2502.09992), other ways to choose are Dream's
(https://arxiv.org/abs/2508.15487), the threshold and the renewed cache are Fast-dLLM's (https://arxiv.org/abs/2505.22618).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.inventory import Diffusion
from llmc.runtime.kv.rows import Window
from llmc.runtime.sampling.draws import pick, uniform
from llmc.runtime.sampling.logits import Logits, check_peak, weigh
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.truncation import scale

Doubles = NDArray[np.float64]

BLOCK_LENGTH, THRESHOLD = 32, 0.9  # what Fast-dLLM recommends


class Denoiser:
    """Fills the masks behind a prompt. :meth:`window` is the next call to make, whose logits :meth:`take` takes.

    Args:
        params: with a seed, if anything is left to chance.
    """

    def __init__(self, diffusion: Diffusion, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._model, self._params = diffusion, params
        self._tokens = np.array([*prompt, *[diffusion.mask_token_id] * params.max_tokens], np.int64)
        self._masked: NDArray[np.intp] = np.arange(0)
        self._step = 0
        self._begin_block(len(prompt), None)

    @property
    def length(self) -> int:
        """Positions of prompt and answer."""
        return len(self._tokens)

    def window(self) -> Window:
        """The next call: of the whole sequence, or, with a cache, of this block alone, before whose first step the
        block before is computed once more, now that it is whole."""
        start, end, fresh = self._start, self._end, self._step == 0
        kept = self._params.block_cache
        if kept == "off" or (fresh and (kept == "renewed" or self._before is None)):
            start, end = 0, self.length
        elif fresh and self._before is not None:
            start = self._before
        start = max(0, start - self._model.shift)
        wanted = self._masked - self._model.shift - start
        return Window(start, self._tokens[start:end].tolist(), self.length, wanted.tolist())

    def take(self, logits: Logits) -> list[int]:
        """Fill some masks from the logits [n, V] that begin with those of masks left in the block; its tokens once all
        are filled."""
        masked, logits = self._masked, logits[: len(self._masked)]
        of_masks = logits[:, self._model.mask_token_id].copy()
        logits[:, self._model.mask_token_id] = -np.inf  # a mask that stays one would never end
        tokens = self._choose(logits)
        logits[:, self._model.mask_token_id] = of_masks
        sure = self._confidence(logits, tokens)
        order = np.argsort(-sure, kind="stable")
        order = order[: self._count(sure[order])]
        self._tokens[masked[order]] = tokens[order]
        self._step += 1
        self._masked = np.delete(masked, order)
        if self._masked.size:
            return []
        found: list[int] = self._tokens[self._start : self._end].tolist()
        self._begin_block(self._end, self._start)
        return found

    def _begin_block(self, start: int, before: int | None) -> None:
        end = min(start + (self._params.block_length or BLOCK_LENGTH), self.length)
        self._start, self._end, self._before = start, end, before
        self._masked, self._step = np.arange(start, end), 0

    def _count(self, sure: Doubles) -> int:
        """The number of masks to fill, of those left, the surest first; at least one."""
        params, length = self._params, self._end - self._start
        if params.diffusion_steps is None and params.remasking in ("low_confidence", "margin"):
            threshold = THRESHOLD if params.confidence_threshold is None else params.confidence_threshold
            return max(1, int((sure >= threshold).sum()))
        steps = params.diffusion_steps or params.max_tokens
        steps = min(length, max(1, steps * length // params.max_tokens))
        return length // steps + (self._step < length % steps)

    def _choose(self, logits: Logits) -> NDArray[np.int64]:
        """A token for each row: the most probable one, or one drawn at the temperature, as Gumbel's noise would."""
        seed, heat = self._params.seed, self._params.temperature
        for row in logits:
            check_peak(float(row.max()))
        if not heat or seed is None:
            return np.array(logits.argmax(axis=1), np.int64)
        draws = [uniform(seed, position, 2 * self._step) for position in self._masked.tolist()]
        found = [pick(weigh(scale(row, heat)), draw) for row, draw in zip(logits, draws, strict=True)]
        return np.array(found, np.int64)

    def _confidence(self, logits: Logits, tokens: NDArray[np.int64]) -> Doubles:
        """Confidence of each row in its token, whatever the temperature."""
        way, seed = self._params.remasking, self._params.seed
        if way != "random":
            return np.array([measure_confidence(row, token, way) for row, token in zip(logits, tokens, strict=True)])
        assert seed is not None
        return np.array([uniform(seed, place, 2 * self._step + 1) for place in self._masked.tolist()])


def measure_confidence(row: Logits, token: int, way: str) -> float:
    """The probability of ``token`` by logits [V]; with ``margin`` how far the likeliest is ahead of the next, with
    ``entropy`` minus that, in nats."""
    weights = weigh(row)
    likeliest, chosen = int(weights.argmax()), float(weights[token])
    weights[likeliest] = 0.0
    mass = 1.0 + float(weights.sum())  # a sum in float32 would take a token ahead by 17 nats for certain
    if way == "low_confidence":
        return chosen / mass
    if way == "entropy":
        return float(weights @ (row - row[likeliest])) / mass - math.log(mass)
    return (1.0 - float(weights.max())) / mass
