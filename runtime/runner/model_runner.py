"""Steps as calls of the session, in shapes that keep what a level of determinism promises.

Kernels choose other code for other shapes, and other code rounds otherwise; a quantized activation then flips to its
neighbour, and logits change by about a hundredth of their spread. Measured on ONNX Runtime 1.31 (x86-64): tokens of one
row give bit-identical results in calls of any even number of tokens; so do batches of one token per row for any even
number of rows; one token alone differs from several (attention's product with the values), and where weights are
unpacked in pairs of rows, the odd last row differs from the paired ones.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from llmc.bundle import Manifest
from llmc.bundle.contract import BROUGHT, INPUTS
from llmc.runtime.api.adapters import list_step_graphs
from llmc.runtime.api.options import Determinism, in_pairs
from llmc.runtime.kv.rows import Rows, Slot, Window
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.runner.adapters import add_factors
from llmc.runtime.runner.ahead import StepsAhead
from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.runner.prefill import Floats, list_sharing, make_shared_batch, prefill
from llmc.runtime.sessions import Batch, Phase, Session

# From so many tokens in a call the W8A8 graph of prefill replaces the weight-only graph of decode, by the precision of
# the latter. The figures are fixed, so that a request gives the same tokens tomorrow. One thread takes the same time on
# both between 3 and 4 tokens (int8) and 5 and 6 (int4); with more threads the many small nodes of W8A8 count more.
PREFILL_GRAPH_FROM = {"int8": 5, "int4": 6}
NEVER = 1 << 30
# Tokens per call where every position's logits are asked for: 32 x 152k float32 are 20 MB.
CHUNK_WITH_ALL_LOGITS = 32


_S = TypeVar("_S", bound=Slot)
Watch = Callable[[Slot, int, Floats], None]
"""Called for each row of a call with its slot, the first position and hidden states [n, W] of its tokens, if the
session gives them; only of tokens with logits if layers share caches."""


@dataclass(frozen=True)
class Policy:
    """The shapes of calls that keep the promise of a level of determinism, on the kernels of a bundle."""

    prefill_graph_from: int = NEVER  # tokens from which a decode step runs on the graph of prefill
    in_pairs: bool = False  # batches have an even number of rows; an odd one runs with the row after it
    row_by_row: bool = False  # every row has a call of its own
    even: bool = False  # calls of one row have an even number of tokens; the last may be a dummy, written again later
    shares_prefill: bool = False  # prompts that wait together may be fed in one call
    shares_windows: bool = False  # windows of equal length may share a call
    graphs_apart: bool = False  # rows that take another graph share no call with others
    turns: int = 1  # groups of rows whose steps are begun in turn

    @classmethod
    def of(cls, level: Determinism, session: Session, manifest: Manifest, max_rows: int) -> "Policy":
        """The policy of ``level``, for a session of up to ``max_rows`` rows."""
        graphs = manifest.graphs
        if level is Determinism.BATCH:
            return cls(in_pairs=in_pairs(manifest, level) and max_rows > 1, graphs_apart=True)
        if level is Determinism.STRICT:
            steps = [graph.invariance for graph in list_step_graphs(manifest)]
            return cls(row_by_row=True, even=any(not it.single or it.rows != 1 or it.tokens == 2 for it in steps))
        split = graphs["prefill"].file != graphs["decode"].file
        graph_from = PREFILL_GRAPH_FROM.get(_find_precision(manifest), NEVER) if split else NEVER
        turns = 1 if manifest.geometry.has_states else session.turns  # steps begun anew would change a state twice
        return cls(graph_from, shares_prefill=session.packs_rows, shares_windows=True, turns=turns)


def _find_precision(manifest: Manifest) -> str:
    """Precision of the body; if the checkpoint was quantized already, its smallest width."""
    if manifest.recipe.precision != "source":
        return manifest.recipe.precision
    return f"int{min((linear.codes.bits for linear in manifest.geometry.linears if linear.codes), default=8)}"


class ModelRunner:
    """Turns scheduled steps into calls of the session, learns what they cost, and makes room in the cache.

    ``rows`` says who holds which row; ``max_context`` and ``max_rows`` bound the cache; ``prefill_chunk`` is in tokens.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        rows: Rows[Any],
        level: Determinism,
        *,
        max_context: int,
        max_rows: int,
        prefill_chunk: int,
        metrics: EngineMetrics,
    ) -> None:
        self.session = session
        self.max_context = max_context
        self.costs = StepCosts()
        self._rows = rows
        self._chunk = prefill_chunk
        self._metrics = metrics
        self._policy = Policy.of(level, session, manifest, max_rows)
        self._has_states = manifest.geometry.has_states
        self.long_after = manifest.geometry.long_after
        self._asks_more = any(it.when(manifest.geometry) for it in INPUTS.values() if it not in BROUGHT)
        self._gives_last_rows = manifest.geometry.shares
        self._most_results = manifest.geometry.most_results
        self._strict = level is Determinism.STRICT
        self._last = _zeros(0, Phase.DECODE, 0)  # step without drafts
        turns = self._policy.turns
        self._ahead: StepsAhead[Any] | None = StepsAhead(self._begin, turns) if turns > 1 else None
        self.watch: Watch | None = None

    def reserve(self, rows: int, positions: int) -> None:
        """Make room for so many rows and positions, and for the dummies that the policy adds."""
        rows += rows % 2 if self._policy.in_pairs else 0
        self.session.cache.grow(rows, max(1, positions + self._strict), self.max_context)

    def prefill(self, sequences: Sequence[Slot], every: bool = False) -> list[Floats]:
        """Feed the next chunk of one sequence, or the whole contexts of several that share a call.

        Returns for each of them logits [O, V] of ``every`` new position, or of the context's last one, of which the
        session may give candidates [O]; the next call may overwrite them.
        """
        if len(sequences) > 1:
            logits = [*self._run(make_shared_batch(sequences))]
            for sequence in sequences:
                sequence.cached = len(sequence.context)
            return logits
        size = min(self._chunk, CHUNK_WITH_ALL_LOGITS) if every else self._chunk
        slots = [] if every else sequences
        return [next(prefill(lambda call: self._run(call, slots), sequences[0], size, every=every))]

    def group_prefill(self, waiting: Sequence[_S]) -> list[_S]:
        """The first sequences of ``waiting``, in rows side by side with nothing fed yet, that share its first call."""
        most = len(waiting) if self._policy.shares_prefill else 1
        return list_sharing(waiting[:most], self._chunk, self.session.cache.capacity)

    def divide(self, sequences: Sequence[_S]) -> Iterator[tuple[list[_S], Callable[[], Floats]]]:
        """Calls of a step, each with its sequences: in rows side by side, with one token each, or with windows of one
        length. Where groups of rows take turns, only the call of the group whose turn it is."""
        if self._ahead is not None and (turn := self._ahead.next(sequences)) is not None:
            group, begun = turn
            yield group, partial(self._run, begun)
            return

        def kind(sequence: _S) -> tuple[bool, int, bool]:
            apart = self._policy.graphs_apart and sequence.has_own_graph
            return bool(sequence.drafts), len(sequence.window.tokens) if sequence.window else 0, apart

        for (drafted, tokens, _), neighbours in groupby(sequences, kind):
            group = list(neighbours)
            most = 1 if drafted else len(group)
            if tokens:
                masks = max(len(sequence.window.outputs) for sequence in group if sequence.window)
                most = (
                    max(1, min(self._chunk // tokens, self._most_results // masks))
                    if self._policy.shares_windows
                    else 1
                )
            for start in range(0, len(group), most):
                part = group[start : start + most]
                yield part, partial(self.execute, part)

    def execute(self, call: Sequence[Slot]) -> Floats:
        """Feed last tokens and drafts, or windows, of sequences that share a call.

        Returns logits [B, 1 + drafts, V] or candidates [B, 1 + drafts]; of windows logits of their outputs, followed by
        any others. The next call may overwrite them.
        """
        if windows := [slot.window for slot in call if slot.window is not None]:
            return self._run(make_window_batch(windows, call[0].row))
        if len(call) == 1 and call[0].drafts:
            return self._verify(call[0], call[0].drafts)[None]
        if self._policy.row_by_row:
            return self._one_by_one(call)
        return self._run(self._step(call, self.phase(len(call))), call)

    def _begin(self, group: Sequence[Slot], rows: int) -> Batch:
        self._last = _zeros(0, Phase.DECODE, 0)  # another's are under way
        return self.session.begin(self._step(group, self.phase(rows)))

    def _step(self, call: Sequence[Slot], phase: Phase) -> Batch:
        """A call that feeds last tokens; mostly the last step's, whose arrays are written in place."""
        odd = self._policy.in_pairs and len(call) % 2
        rows, first, last = len(call) + odd, call[0].row, self._last
        if (len(last.input_ids), last.phase, last.first_row) != (rows, phase, first):
            self._last = last = _zeros(rows, phase, first)
        ids, lengths = last.input_ids, last.past_lengths
        for i, sequence in enumerate(call):
            ids[i, 0], lengths[i] = sequence.context[sequence.cached], sequence.cached
        if odd:
            # Nothing that counts is overwritten: the neighbour's next position is written again before it is read.
            neighbour = self._rows.at(call[-1].row + 1)
            lengths[-1] = 0 if neighbour is None else neighbour.cached
            if self._has_states:  # which stay as they are
                last = last.feed(new_lengths=np.array([1] * len(call) + [0], np.int64))
        return self._complete(last, call)

    def _complete(self, call: Batch, slots: Sequence[Slot]) -> Batch:
        """A call with the inputs and the adapters that its first rows bring; rows behind these are dummies."""
        if self._asks_more:
            starts, tokens = call.past_lengths.tolist(), call.input_ids.shape[1]
            pairs = zip(slots, starts, strict=False)
            call = call.feed_rows([slot.feeds(start, start + tokens) for slot, start in pairs])
        return add_factors(call, slots)

    def phase(self, tokens: int) -> Phase:
        """The graph for a call of so many tokens."""
        return Phase.PREFILL if tokens >= self._policy.prefill_graph_from else Phase.DECODE

    def step_seconds(self, rows: int) -> float | None:
        """Seconds of a step of so many rows without drafts, as far as that is known."""
        if self._policy.row_by_row:
            one = self.costs.predict(Phase.DECODE, 1, 2 if self._policy.even else 1)
            return None if one is None else rows * one
        return self.costs.predict(self.phase(rows), rows + (rows % 2 if self._policy.in_pairs else 0), 1)

    def accept(self, sequence: Slot, tokens: int) -> None:
        """Keep the first ``tokens`` of the last token and drafts that :meth:`execute` fed."""
        if sequence.drafts and self._has_states:
            self.session.accept(sequence.row, sequence.cached, tokens)

    def _one_by_one(self, call: Sequence[Slot]) -> Floats:
        # Copies, for the next call overwrites them.
        return np.stack([self._verify(sequence, ())[:1].copy() for sequence in call])

    def _verify(self, sequence: Slot, drafts: Sequence[int]) -> Floats:
        tokens = [sequence.context[sequence.cached], *drafts]
        padded = tokens + [0] * (len(tokens) % 2 if self._policy.even else 0)
        indices = np.arange(len(padded), dtype=np.int64)[None]
        ids, past = np.array([padded], np.int64), np.array([sequence.cached], np.int64)
        found = Batch.of(self.phase(len(padded)), ids, past, indices, sequence.row)
        if self._has_states:
            found = replace(found.feed(new_lengths=np.array([len(tokens)], np.int64)), provisional=bool(drafts))
        logits: Floats = self._run(self._complete(found, [sequence]), [sequence] if drafts else [])[0]
        return logits[: len(tokens)]

    def _run(self, call: Batch, slots: Sequence[Slot] = ()) -> Floats:
        """Make a call; some of ``slots`` may do with candidates instead of logits."""
        rows, tokens = call.input_ids.shape
        run = self.session.run_ranked if any(slot.takes_ranked for slot in slots) else self.session.run
        start = time.perf_counter()
        logits: Floats = run(call)
        seconds = time.perf_counter() - start
        shape = rows, tokens
        if "new_lengths" in call.feeds and 1 not in shape:  # padding costs next to nothing: as if in one row
            shape = 1, sum(call.counts)
        if call.begun is None:  # a part of others was computed meanwhile
            self.costs.observe(call.phase, *shape, seconds)
        self._metrics.step(call.phase.value, seconds, rows)
        if self.watch is not None and self.session.hidden is not None and self.session.hidden.size:
            for row, (past, count) in enumerate(zip(call.past_lengths.tolist(), call.counts, strict=True)):
                if (slot := self._rows.at(call.first_row + row)) is not None:
                    first = past + int(call.logit_indices[row, 0]) if self._gives_last_rows else past
                    self.watch(slot, first, self.session.hidden[row, :count])
        return logits


def _zeros(rows: int, phase: Phase, first_row: int) -> Batch:
    ids, lengths, indices = (np.zeros(shape, np.int64) for shape in ((rows, 1), rows, (rows, 1)))
    return Batch.of(phase, ids, lengths, indices, first_row)


def make_window_batch(windows: Sequence[Window], first_row: int) -> Batch:
    """The call of windows of one length, with the logits of its last output again for one that has fewer."""
    most = max(len(window.outputs) for window in windows)
    outputs = [[*window.outputs, *window.outputs[-1:] * (most - len(window.outputs))] for window in windows]
    fields = [it.tokens for it in windows], [it.start for it in windows], outputs
    ids, starts, asked = (np.array(values, np.int64) for values in fields)
    return Batch.of(Phase.PREFILL, ids, starts, asked, first_row).feed_rows([it.feeds for it in windows])
