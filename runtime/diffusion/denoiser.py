"""A diffusion model's answer begins as masks; every step turns the masks with the most probable tokens into tokens.

The rule is LLaDA's (https://arxiv.org/abs/2502.09992), the threshold Fast-dLLM's (https://arxiv.org/abs/2505.22618).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.model.diffusion import Diffusion
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
        """The next call: first the whole sequence, then the current block only. The first step of a block also computes
        the block before it again, which is complete now."""
        start, end = self._start, self._end
        if self._step == 0:
            start, end = (0, self.length) if self._before is None else (self._before, end)
        start = max(0, start - self._model.shift)
        wanted = self._masked - self._model.shift - start
        seen = {"seen_lengths": np.array([self.length])}
        return Window(start, self._tokens[start:end].tolist(), wanted.tolist(), seen)

    def take(self, logits: Logits) -> list[int]:
        """Fill some masks from logits [n, V]; the first rows are of the masks left in the block. Return the block's
        tokens once all are filled, else none."""
        masked, logits = self._masked, logits[: len(self._masked)]
        of_masks = logits[:, self._model.mask_token_id].copy()
        logits[:, self._model.mask_token_id] = -np.inf  # a mask that stays one would never end
        tokens = self._choose(logits)
        logits[:, self._model.mask_token_id] = of_masks
        sure = np.array([measure_confidence(row, token) for row, token in zip(logits, tokens, strict=True)])
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
        if params.diffusion_steps is None:
            threshold = THRESHOLD if params.confidence_threshold is None else params.confidence_threshold
            return max(1, int((sure >= threshold).sum()))
        steps = min(length, max(1, params.diffusion_steps * length // params.max_tokens))
        return length // steps + (self._step < length % steps)

    def _choose(self, logits: Logits) -> NDArray[np.int64]:
        """A token for each row: the most probable one, or one drawn at the temperature, as Gumbel's noise would."""
        seed, heat = self._params.seed, self._params.temperature
        for row in logits:
            check_peak(float(row.max()))
        if not heat or seed is None:
            return np.array(logits.argmax(axis=1), np.int64)
        draws = [uniform(seed, position, self._step) for position in self._masked.tolist()]
        found = [pick(weigh(scale(row, heat)), draw) for row, draw in zip(logits, draws, strict=True)]
        return np.array(found, np.int64)


def measure_confidence(row: Logits, token: int) -> float:
    """The probability of ``token`` by logits [V], whatever the temperature."""
    weights = weigh(row)
    likeliest, chosen = int(weights.argmax()), float(weights[token])
    weights[likeliest] = 0.0
    # A sum in float32 would give a token that is 17 nats ahead a probability of 1.
    return chosen / (1.0 + float(weights.sum()))
