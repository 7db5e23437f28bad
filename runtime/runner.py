"""From tokens to tokens: prefill in chunks, then one token at a time."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import RequestError, UsageError
from llmc.runtime.calls import next_end
from llmc.runtime.kv_cache import next_capacity
from llmc.runtime.memory import check_growth
from llmc.runtime.sampling import Sampler
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
        self._vocab_size = manifest.geometry.vocab_size
        # Reused by every step: its arrays are written in place, for after a step all caches are cold.
        self._step = batch(Phase.DECODE, np.zeros((1, 1), np.int64), [0], [0])

    def tokens(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
        """Sample tokens after ``prompt`` for as long as the caller asks and the context has room."""
        logits, tokens = self.prefill(prompt), list(prompt)
        for position in range(len(prompt), self.max_context):
            token = sampler(logits[0, -1], tokens).token
            yield token
            logits = self.step(token, position)
            tokens.append(token)

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
        if positions > self.session.capacity:
            capacity = next_capacity(positions, self.max_context)
            check_growth(self._manifest, self.session, 1, capacity)
            self.session.reserve(1, capacity)

    def check_tokens(self, where: str, tokens: Sequence[int]) -> None:
        """Refuse token ids outside the vocabulary.

        Raises:
            UsageError: with the first such id.
        """
        check_tokens(where, tokens, self._vocab_size)

    def check_prompt(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Refuse a request that cannot be served whole.

        Raises:
            RequestError: empty, or prompt and new tokens exceed the context.
            UsageError: a token id outside the vocabulary.
        """
        if not len(prompt):
            raise RequestError("the prompt is empty: it has no tokens; give at least one character")
        self.check_tokens("the prompt holds", prompt)
        if len(prompt) + max_tokens > self.max_context:
            room = self.max_context - len(prompt)
            advice = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and {max_tokens} new ones are asked for, but the context holds "
                f"{self.max_context}; {advice}, or build with a larger --max-context"
            )


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each call that feeds ``length`` tokens, at least one, about ``size`` at a time.

    They are cut where the engine cuts a prompt, see :func:`llmc.runtime.calls.next_end`.
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


def check_tokens(where: str, tokens: Collection[int], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        UsageError: with the first such id.
    """
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"{where} token id {wrong}, which is out of range, expected 0 ... {vocab_size - 1}")
