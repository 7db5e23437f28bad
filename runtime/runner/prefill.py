"""One sequence alone, from tokens to logits: a prompt in chunks, then one token at a time."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import RequestError
from llmc.runtime.runner.model_runner import next_end
from llmc.runtime.sessions import Batch, Phase, Session


class Runner:
    """Runs one sequence at a time on a session. Not thread-safe; :class:`llmc.runtime.model.Model` takes turns.

    Args:
        session: the loaded graphs and their cache.
        manifest: of the bundle the session was opened from.
        max_context: longest sequence, prompt and new tokens together.
        prefill_chunk: prompt tokens per call.
    """

    def __init__(self, session: Session, manifest: Manifest, max_context: int, prefill_chunk: int) -> None:
        self.session = session
        self.max_context = max_context
        self.prefill_chunk = prefill_chunk
        self._manifest = manifest
        # Reused by every step: its arrays are written in place, for after a step all caches are cold.
        self._step = batch(Phase.DECODE, np.zeros((1, 1), np.int64), [0], [0])

    def prefill(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Feed the prompt in chunks from an empty cache and return the logits after its last token [1, 1, V]."""
        ids = np.asarray(prompt, np.int64)[None]
        self.reserve(len(prompt))
        *heads, (start, end) = chunks(len(prompt), self.prefill_chunk)
        for past, until in heads:
            self.session.run(batch(Phase.PREFILL, ids[:, past:until], [past], []))
        return self.session.run(batch(Phase.PREFILL, ids[:, start:end], [start], [end - start - 1]))

    def step(self, token: int, position: int) -> NDArray[np.float32]:
        """Feed one token at ``position`` and return the logits after it [1, 1, V]."""
        self.reserve(position + 1)
        self._step.input_ids[0, 0] = token
        self._step.past_lengths[0] = position
        return self.session.run(self._step)

    def logits(self, ids: Sequence[int], phase: Phase = Phase.PREFILL) -> NDArray[np.float32]:
        """Logits after every token of ``ids`` [n, V], through the path that ``phase`` names, for evaluation."""
        self.reserve(len(ids))
        row = np.asarray(ids, np.int64)[None]
        single = [(i, i + 1) for i in range(len(ids))]
        parts = []
        for start, end in chunks(len(ids), self.prefill_chunk) if phase is Phase.PREFILL else single:
            call = batch(phase, row[:, start:end], [start], np.arange(end - start))
            parts.append(self.session.run(call)[0].copy())
        return np.concatenate(parts)

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` tokens, growing the cache in steps.

        Raises:
            ResourceError: the machine has not enough memory left.
            RequestError: the context ends before.
        """
        if positions > self.max_context:
            raise RequestError(f"position {positions} is asked for, the context holds {self.max_context}")
        self.session.cache.grow(1, positions, self.max_context)


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each call that feeds ``length`` tokens, at least one, about ``size`` at a time.

    They are cut where the engine cuts a prompt, see :func:`llmc.runtime.runner.model_runner.next_end`.
    """
    ends = [0]
    while ends[-1] < length:
        ends.append(next_end(ends[-1], length, size))
    return list(pairwise(ends))


def batch(
    phase: Phase, ids: NDArray[np.int64], past: Sequence[int], indices: Sequence[int] | NDArray[np.int64]
) -> Batch:
    """One row's call: ``ids`` [1, S] after ``past`` [1] positions, logits at ``indices`` [O]."""
    return Batch(phase, ids, np.asarray(past, np.int64), np.asarray(indices, np.int64)[None])
