"""How steps become calls of the session, and what each way of calling promises.

Kernels choose other code for other shapes, and other code rounds otherwise; a quantized activation then flips to its
neighbour, and logits change by about a hundredth of their spread. Measured on ONNX Runtime 1.31 (x86-64): tokens of one
row give bit-identical results in calls of any even number of tokens; so do batches of one token per row for any even
number of rows; one token alone differs from several (attention's product with the values), and where weights are
unpacked in pairs of rows, the odd last row differs from the paired ones.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.runtime.api.options import Determinism
from llmc.runtime.engine.sequence import Strand
from llmc.runtime.kv.rows import Rows
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.runner.costs import StepCosts
from llmc.runtime.sampling import suffice
from llmc.runtime.sessions import Batch, Phase, Session

Floats = NDArray[np.float32]

# From so many tokens in a call the W8A8 graph of prefill is faster than the weight-only graph of decode, by the bits of
# the latter. Fixed, not timed, so that the same requests give the same tokens tomorrow.
PREFILL_GRAPH_FROM = {"int8": 5, "int4": 10}
# Tokens of a call that verifies drafts, usually: the one before them, and 3 to 7 of them.
TYPICAL_VERIFICATION = 6
# Queries per tile of ONNX Runtime's attention on CPUs.
ATTENTION_TILE = 64
# Tokens per call where every position's logits are asked for: 32 x 152k float32 are 20 MB.
CHUNK_WITH_ALL_LOGITS = 32


class FastCalls:
    """The three things that are run, in the quickest way; see :class:`llmc.runtime.api.options.Determinism`."""

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        rows: Rows,
        costs: StepCosts,
        metrics: EngineMetrics,
        *,
        in_pairs: bool = False,
    ) -> None:
        self.session = session
        self.rows = rows
        self._costs = costs
        self._metrics = metrics
        graphs = manifest.graphs
        self._in_pairs = in_pairs
        self._candidates = 0 if manifest.engine is None else manifest.engine.candidates
        self._dummy = not graphs["decode"].invariance.single or graphs["decode"].invariance.tokens == 2
        split = "prefill" in graphs and graphs["prefill"].file != graphs["decode"].file and not session.substitutes
        self._prefill_graph_from = PREFILL_GRAPH_FROM.get(manifest.recipe.precision, 1 << 30) if split else 1 << 30

    def feed(self, strand: Strand, end: int, outputs: Sequence[int]) -> Floats:
        """Feed ``strand.context[strand.cached : end]``; logits [O, V] at ``outputs`` of the new positions."""
        ids = np.array([strand.context[strand.cached : end]], np.int64)
        logits: Floats = self._run(Phase.PREFILL, ids, [strand.cached], [list(outputs)], strand.row)[0]
        return logits

    def decode(self, strands: Sequence[Strand]) -> tuple[Floats, Floats | None]:
        """Feed each strand's last token; they hold neighbouring rows. Logits [B, V], hidden states [B, H]."""
        ids = [[strand.context[strand.cached]] for strand in strands]
        past = [strand.cached for strand in strands]
        return self._one_token_each(self.phase(len(strands)), ids, past, strands)

    def verify(self, strand: Strand, drafts: Sequence[int]) -> Floats:
        """Feed the last token and ``drafts``; logits [1 + drafts, V]."""
        return self._one_row(strand, self.verify_phase, [*strand.context[strand.cached :], *drafts])

    @property
    def verify_phase(self) -> Phase:
        """The graph that verifies drafts: one for any number of them, so that costs can be compared."""
        return self.phase(TYPICAL_VERIFICATION)

    def phase(self, tokens: int) -> Phase:
        """The graph for a step of so many tokens."""
        return Phase.PREFILL if tokens >= self._prefill_graph_from else Phase.DECODE

    def step_seconds(self, rows: int) -> float | None:
        """What a step of so many rows without drafts takes, as far as that is known."""
        return self._costs.predict(self.phase(rows), rows, 1)

    def _one_token_each(
        self, phase: Phase, ids: list[list[int]], past: list[int], strands: Sequence[Strand]
    ) -> tuple[Floats, Floats | None]:
        """One call, which brings the largest logits only where these decide every strand's token."""
        few = all(0 < strand.needs < self._candidates for strand in strands)
        wanted = self._candidates if few else 0
        logits = self._run(phase, np.array(ids, np.int64), past, [[0]] * len(ids), strands[0].row, wanted)
        if few and not all(suffice(row, strand.needs) for row, strand in zip(logits[:, 0], strands, strict=False)):
            logits = self.session.full_logits()
        hidden = self.session.hidden
        return logits[:, 0], None if hidden is None else hidden[:, 0]

    def _one_row(self, strand: Strand, phase: Phase, tokens: list[int]) -> Floats:
        ids = np.array([tokens], np.int64)
        logits: Floats = self._run(phase, ids, [strand.cached], [list(range(len(tokens)))], strand.row)[0]
        return logits

    def _run(
        self,
        phase: Phase,
        ids: NDArray[np.int64],
        past: list[int],
        outputs: list[list[int]],
        row: int,
        candidates: int = 0,
    ) -> Floats:
        indices = np.array(outputs, np.int64).reshape(len(ids), -1)
        start = time.perf_counter()
        logits: Floats = self.session.run(Batch(phase, ids, np.array(past, np.int64), indices, row, candidates))
        seconds = time.perf_counter() - start
        self._costs.observe(phase, len(ids), ids.shape[1], seconds)
        self._metrics.step(phase.value, seconds, len(ids))
        return logits


class BatchCalls(FastCalls):
    """One graph for decoding, and rows in pairs."""

    def phase(self, tokens: int) -> Phase:
        """Always the same."""
        return Phase.DECODE

    def step_seconds(self, rows: int) -> float | None:
        """See :class:`FastCalls`."""
        return self._costs.predict(Phase.DECODE, rows + (rows % 2 if self._in_pairs else 0), 1)

    def decode(self, strands: Sequence[Strand]) -> tuple[Floats, Floats | None]:
        """See :class:`FastCalls`. An odd batch runs with the row after it, of which nothing that counts is overwritten:
        its next position is written again before it is read."""
        ids = [[strand.context[strand.cached]] for strand in strands]
        past = [strand.cached for strand in strands]
        if self._in_pairs and len(strands) % 2:
            neighbour = self.rows.at(strands[-1].row + 1)
            ids.append([0])
            past.append(0 if neighbour is None else neighbour.cached)
        return self._one_token_each(Phase.DECODE, ids, past, strands)


class StrictCalls(BatchCalls):
    """Row by row, an even number of tokens each: the last may be a dummy, whose position is written again."""

    def step_seconds(self, rows: int) -> float | None:
        """See :class:`FastCalls`."""
        one = self._costs.predict(Phase.DECODE, 1, 2 if self._dummy else 1)
        return None if one is None else rows * one

    def decode(self, strands: Sequence[Strand]) -> tuple[Floats, Floats | None]:
        """See :class:`FastCalls`."""
        logits, states = [], []
        for strand in strands:  # copies, for the next call overwrites them
            logits.append(self.verify(strand, ())[0].copy())
            states += [] if self.session.hidden is None else [self.session.hidden[0, 0].copy()]
        return np.stack(logits), np.stack(states) if states else None

    def verify(self, strand: Strand, drafts: Sequence[int]) -> Floats:
        """See :class:`FastCalls`."""
        tokens = [*strand.context[strand.cached :], *drafts]
        padded = tokens + [0] * (len(tokens) % 2 if self._dummy else 0)
        return self._one_row(strand, Phase.DECODE, padded)[: len(tokens)]


def make_calls(
    level: Determinism,
    session: Session,
    manifest: Manifest,
    rows: Rows,
    costs: StepCosts,
    metrics: EngineMetrics,
    *,
    in_pairs: bool = False,
) -> FastCalls:
    """The way of calling that keeps the promise of ``level``."""
    kind = {Determinism.FAST: FastCalls, Determinism.BATCH: BatchCalls, Determinism.STRICT: StrictCalls}[level]
    return kind(session, manifest, rows, costs, metrics, in_pairs=in_pairs)


def next_end(start: int, total: int, size: int) -> int:
    """Where the chunk from ``start`` ends: about ``size`` tokens on, an even number, and no single token is left.

    No call has 64 k + 1 tokens: attention works in tiles of 64 queries, and a lone last one takes other code, so its
    result would depend on where the prompt is cut.
    """
    end = start + max(2, size - size % 2)
    if total - end >= 2:
        return end
    return total - 3 if total - start > 1 and (total - start) % ATTENTION_TILE == 1 else total
