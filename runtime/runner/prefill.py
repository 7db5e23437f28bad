"""Prompts in chunks, for the engine and for one sequence at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError
from llmc.runtime.kv.rows import Slot
from llmc.runtime.runner.adapters import add_factors
from llmc.runtime.sessions import Batch, Phase, Session

Floats = NDArray[np.float32]

# Queries that ONNX Runtime's attention on CPUs computes at a time.
ATTENTION_TILE = 64
# Most tokens of a call that prompts share. In larger calls reading weights is a sixth of the time (0.5B, int4, two
# cores), and prompts wait longer for each other than for their turn.
SHARED_TOKENS = 128

_S = TypeVar("_S", bound=Slot)


def prefill(
    run: Callable[[Batch], Floats], sequence: Slot, size: int, *, every: bool = False, phase: Phase = Phase.PREFILL
) -> Iterator[Floats]:
    """Feed the tokens that are not in the row yet, a chunk for each item: its logits [O, V], which the next chunk may
    overwrite.

    Args:
        run: makes a call of the session.
        size: tokens per chunk; with the graph of decode there is one.
        every: give logits of all positions, not only of the context's last.
        phase: names the graph.
    """
    total = len(sequence.context)
    while (start := sequence.cached) < total:
        end = next_end(start, total, size) if phase is Phase.PREFILL else start + 1
        end = sequence.stop if start < sequence.stop < end else end
        end = sequence.fit_end(start, end)
        outputs = range(end - start) if every else [end - start - 1] if end == total else []
        ids = np.array([sequence.context[start:end]], np.int64)
        call = batch(phase, ids, [start], outputs, sequence.row).feed(**sequence.feeds(start, end))
        logits = run(add_factors(call, [sequence]))
        sequence.cached = end
        yield logits[0]


def next_end(start: int, total: int, size: int) -> int:
    """The end of the chunk from ``start``: about ``size`` tokens on, an even number, and no single token is left.

    No call has 64 k + 1 tokens: attention computes 64 queries at a time, and a lone last one takes other code, so its
    result would depend on where the prompt is cut.
    """
    end = start + max(2, size - size % 2)
    if total - end >= 2:
        return end
    return total - 3 if total - start > 1 and (total - start) % ATTENTION_TILE == 1 else total


def batch(phase: Phase, ids: NDArray[np.int64], past: Sequence[int], outputs: Sequence[int], row: int = 0) -> Batch:
    """One row's call: ``ids`` [1, S] after ``past`` [1] positions, logits at ``outputs`` [O]."""
    return Batch.of(phase, ids, np.asarray(past, np.int64), np.array([outputs], np.int64), row)


def list_sharing(waiting: Sequence[_S], chunk: int, capacity: int) -> list[_S]:
    """The first of ``waiting``, with nothing fed yet, that fit into one call whole: up to ``chunk`` tokens, padding
    included, within the ``capacity`` of a row. See also :attr:`Slot.is_fed_alone`."""
    lengths = [len(sequence.context) - sequence.cached for sequence in waiting]
    tokens, widths = list(accumulate(lengths)), list(accumulate(lengths, max))
    past = list(accumulate((sequence.cached for sequence in waiting), max))
    count = 1
    while (
        count < len(waiting)
        and not (waiting[0].is_fed_alone or waiting[count].is_fed_alone)
        and tokens[count] <= min(SHARED_TOKENS, chunk)
        and widths[count] * (count + 1) <= chunk
        and past[count] + widths[count] <= capacity
    ):
        count += 1
    return list(waiting[:count])


def make_shared_batch(sequences: Sequence[Slot]) -> Batch:
    """The call that feeds the rest of each sequence, with logits after its last token."""
    rest = [sequence.context[sequence.cached :] for sequence in sequences]
    lengths = np.array([len(tokens) for tokens in rest], np.int64)
    ids = np.zeros((len(rest), lengths.max()), np.int64)
    for row, tokens in zip(ids, rest, strict=True):
        row[: len(tokens)] = tokens
    past = np.array([sequence.cached for sequence in sequences], np.int64)
    call = Batch.of(Phase.PREFILL, ids, past, lengths[:, None] - 1, sequences[0].row, new_lengths=lengths)
    return call.feed_rows([sequence.feeds(sequence.cached, len(sequence.context)) for sequence in sequences])


class SingleRunner:
    """Runs one sequence at a time on a session of its own, for evaluation and measurements. Not thread-safe."""

    def __init__(self, session: Session, max_context: int, prefill_chunk: int) -> None:
        self.session = session
        self.max_context = max_context
        self.prefill_chunk = prefill_chunk
        # Reused by every step: its arrays are written in place, for after a step all caches are cold.
        self._step = batch(Phase.DECODE, np.zeros((1, 1), np.int64), [0], [0])

    def prefill(self, prompt: Sequence[int], *, chunk: int | None = None, graph: Phase = Phase.PREFILL) -> Floats:
        """Feed the prompt in chunks from an empty cache and return the logits after its last token [1, 1, V].

        ``chunk`` tokens per call, by default :attr:`prefill_chunk`, on ``graph``.
        """
        self.reserve(len(prompt))
        if self.session.sees_all:
            return self._see_whole(prompt, [len(prompt) - 1], graph)
        size = chunk or self.prefill_chunk
        *_, logits = prefill(lambda call: self._run(replace(call, phase=graph)), Slot(prompt, row=0), size)
        return logits[None]

    def prefill_beside(self, other: Sequence[int], prompt: Sequence[int]) -> Floats:
        """Feed both from empty rows in one call, on a session that packs rows; the logits after ``prompt`` [V]."""
        self.session.cache.grow(2, max(len(other), len(prompt)), self.max_context)
        logits: Floats = self.session.run(make_shared_batch([Slot(other, row=0), Slot(prompt, row=1)]))[1, 0]
        return logits

    def step(self, token: int, position: int) -> Floats:
        """Feed one token at ``position`` and return the logits after it [1, 1, V]."""
        self.reserve(position + 1)
        self._step.input_ids[0, 0] = token
        self._step.past_lengths[0] = position
        return self._run(self._step)

    def logits(self, ids: Sequence[int], phase: Phase = Phase.PREFILL) -> Floats:
        """Logits after every token of ``ids`` [n, V], through the path that ``phase`` names."""
        self.reserve(len(ids))
        if self.session.sees_all:
            return np.array(self._see_whole(ids, range(len(ids)), phase)[0])
        parts = prefill(self._run, Slot(ids, row=0), self.prefill_chunk, every=True, phase=phase)
        return np.concatenate([logits.copy() for logits in parts])

    def _see_whole(self, ids: Sequence[int], outputs: Sequence[int], graph: Phase) -> Floats:
        """Logits [1, O, V] of a call whose tokens all see one another."""
        return self._run(batch(graph, np.array([ids], np.int64), [0], outputs))

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` tokens, growing the cache in steps; RequestError beyond the context."""
        if positions > self.max_context:
            raise RequestError(f"position {positions} is asked for, the context holds {self.max_context}")
        self.session.cache.grow(1, positions, self.max_context)

    def _run(self, call: Batch) -> Floats:
        logits: Floats = self.session.run(call)
        self.session.cache.let_go(0, int(call.past_lengths[0]) + call.input_ids.shape[1])
        return logits
