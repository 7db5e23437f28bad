"""Measures which calls of a bundle compute the same bits for a token, whatever else is in the call.

Kernels round differently for other shapes: ONNX Runtime's MatMulNBits multiplies rows in pairs. Its attention computes
64 queries at a time, so calls of 64 k + 1 tokens give other bits for their last token; they are not measured, and a
runtime that wants equal bits never makes them.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Invariance, Manifest
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.optimize.lower.context import Mxfp4, quant_configs
from llmc.runtime.sessions import Batch, Phase, Session

# Numbers of rows, new tokens or logits of the calls that are compared with the largest one: odd and even, within and
# beyond the 4 rows that MatMulNBits' kernels take at once.
SIZES = (1, 2, 3, 4, 5, 6, 8)
# Lengths of pieces of prompts, around 64 and 128 queries; compared with the last one.
LONG_SIZES, LONGEST = (62, 64, 66, 67, 126, 128, 130), 132
# Cached positions of the first row, and how many more each following row has: all even, and different.
PREFIX, LONGER = 12, 2
# Cached positions behind which lone tokens are compared once more: products over a float16 cache that agree after a few
# positions may differ after some hundreds.
FAR = 600
# Smaller contexts, without room for prefixes and calls, are not measured.
SMALLEST_CONTEXT = PREFIX + LONGER * max(SIZES) + max(SIZES)

Same = Callable[[int], bool]
Values = tuple[NDArray[np.float32], NDArray[np.generic]]


def measure_guarantees(session: Session, manifest: Manifest) -> Manifest:
    """The manifest with the measured invariance of each graph; overwrites the session's cache.

    See :func:`can_measure` for the models that get no guarantee.
    """
    if not can_measure(manifest):
        return manifest
    probe = Probe(session, manifest)
    invariances = {phase.value: probe.invariance(phase) for phase in Phase}
    if session.changes_kernels:  # measuring proves nothing for them; calls of one token are still measured
        invariances = {Phase.DECODE.value: Invariance(rows=invariances[Phase.DECODE.value].rows)}
    graphs = {
        name: replace(graph, invariance=invariances.get(name, graph.invariance))
        for name, graph in manifest.graphs.items()
    }
    return replace(manifest, graphs=graphs)


def can_measure(manifest: Manifest) -> bool:
    """False for a context below :data:`SMALLEST_CONTEXT`, experts that round by the number of rows, and a model that
    takes whole texts, whose calls are shared at ``fast`` alone."""
    small, whole = manifest.limits.max_context < SMALLEST_CONTEXT, takes_whole_texts(manifest.geometry)
    return not (small or whole or _has_rounding_experts(manifest))


def _has_rounding_experts(manifest: Manifest) -> bool:
    """True if some experts are not in MXFP4. Such experts round by the number of rows that chose them, even if the few
    calls that are measured here agree."""
    stored = next(iter(quant_configs(manifest.recipe, manifest.geometry).values()))
    return any(stored.stored(item.name) != Mxfp4() for item in manifest.geometry.mixtures)


class Probe:
    """Rows with different prefixes in the cache, and calls that continue them.

    Args:
        change: adds to every call what it brings beside tokens.
    """

    def __init__(
        self, session: Session, manifest: Manifest, change: Callable[[Batch], Batch] = lambda call: call
    ) -> None:
        self._session, self._change = session, change
        limits = manifest.limits
        longest = min(limits.prefill_chunk, limits.max_context - PREFIX, LONGEST)
        self._longest = max(longest - longest % 2, max(SIZES))
        self._files = {phase: manifest.graphs[phase.value].file for phase in Phase}
        self._alone: dict[str, bool] = {}  # by file: whether far lone tokens get the bits of several
        self._long = [tokens for tokens in LONG_SIZES if tokens < self._longest]
        self._rows = [rows for rows in SIZES if rows <= limits.max_batch]
        self._most = min(limits.max_context, FAR + max(SIZES))
        session.cache.reserve(max(self._rows), max(SMALLEST_CONTEXT, PREFIX + self._longest, self._most))
        generator = np.random.default_rng(0)
        vocab_size = manifest.geometry.vocab_size
        self._prefixes = [
            generator.integers(0, vocab_size, PREFIX + LONGER * row).tolist() for row in range(max(self._rows))
        ]
        self._next = generator.integers(0, vocab_size, (max(self._rows), max(SIZES)))
        self._text = generator.integers(0, vocab_size, self._longest)

    def invariance(self, phase: Phase) -> Invariance:
        for row, prefix in enumerate(self._prefixes):
            ids = np.array([prefix], np.int64)
            call = Batch.of(phase, ids, np.zeros(1, np.int64), np.zeros((1, 0), np.int64), row)
            self._session.run(self._change(call))
        cache = self._session.cache
        self._states = [cache.read_states(row, len(prefix)) for row, prefix in enumerate(self._prefixes)]
        most = max(SIZES)
        steps = {rows: self._step(phase, rows) for rows in self._rows}
        pieces = {tokens: self._piece(phase, tokens, most) for tokens in SIZES[1:]}
        outputs = {count: self._piece(phase, most, count) for count in SIZES}
        tokens = _multiple(SIZES[1:], lambda tokens: _same(pieces[tokens], pieces[most], tokens))
        if phase is Phase.PREFILL:  # the weaker of both guarantees
            longer = self._long_pieces(phase)
            tokens = max(tokens, longer) if tokens and longer else 0
        # All other numbers of rows are compared with the largest even one.
        one, many = steps[max((rows for rows in self._rows if rows % 2 == 0), default=1)], pieces[most]
        return Invariance(
            rows=_multiple(self._rows, lambda rows: _same(steps[rows], one, rows)),
            tokens=tokens,
            outputs=_multiple(SIZES, lambda count: _same(outputs[count], many, count)),
            single=_same((one[0][:1], one[1][:1]), many, 1) and self._is_alone_alike(phase),
        )

    def _is_alone_alike(self, phase: Phase) -> bool:
        """True if lone tokens behind a long prefix get the bits that several get in one call; beside another row, where
        rows are computed in pairs. Computed once where both phases have one graph."""
        if (file := self._files[phase]) in self._alone:
            return self._alone[file]
        count, rows = max(SIZES), min(2, len(self._prefixes))
        past = self._most - count
        text, ends = np.resize(self._text, self._most), np.array([len(prefix) for prefix in self._prefixes[:rows]])
        for start in range(0, past, self._longest):
            self._far(Phase.PREFILL, text[None, start : min(past, start + self._longest)], np.array([start]), 0)
        states = self._session.cache.read_states(0, past)
        together = self._far(phase, text[None, past:], np.array([past]), count)[0], self._fill_cache(past, count)
        self._session.cache.write_states(0, past, states)
        alone = []
        for at in range(past, self._most):
            for row in range(1, rows):
                self._session.cache.write_states(row, int(ends[row]), self._states[row])
            ends[0] = at
            alone.append(self._far(phase, np.full((rows, 1), text[at]), ends, 1)[0])
        self._alone[file] = _same((np.concatenate(alone), self._fill_cache(past, count)), together, count)
        return self._alone[file]

    def _far(self, phase: Phase, ids: NDArray[np.int64], past: NDArray[np.int64], outputs: int) -> NDArray[np.float32]:
        """Logits [rows, outputs, vocab] of a call's last ``outputs`` tokens, over the cache as it is."""
        rows, tokens = ids.shape
        indices = np.tile(np.arange(tokens - outputs, tokens), (rows, 1))
        call = Batch.of(phase, ids, past.astype(np.int64), indices)
        logits: NDArray[np.float32] = self._session.run(self._change(call)).copy()
        return logits

    def _step(self, phase: Phase, rows: int) -> Values:
        past = [len(prefix) for prefix in self._prefixes[:rows]]
        zeros = np.zeros((rows, 1), np.int64)
        logits = self._run(Batch.of(phase, self._next[:rows, :1], np.array(past, np.int64), zeros))[:, 0].copy()
        cached = [self._session.cache.read(row, length, length + 1) for row, length in enumerate(past)]
        return logits, np.stack(cached)

    def _long_pieces(self, phase: Phase) -> int:
        """Guarantees for calls of 2 or more tokens, measured with pieces of prompts."""
        past, ends = len(self._prefixes[0]), np.array(self._long, np.int64) - 1

        def run(tokens: int) -> list[NDArray[np.generic]]:
            # Logits at the ends of all calls, equally many in each call; positions beyond its end are clipped to it.
            call = Batch.of(
                phase, self._text[None, :tokens], np.array([past], np.int64), np.minimum(ends, tokens - 1)[None]
            )
            logits, shown = self._run(call)[0], np.count_nonzero(ends < tokens)
            return [logits[:shown].copy(), self._fill_cache(past, tokens)]

        wanted = run(self._longest) if self._long else []

        def same(tokens: int) -> bool:
            return all(np.array_equal(a[: len(b)], b) for a, b in zip(wanted, run(tokens), strict=True))

        return _multiple(self._long, same)

    def _piece(self, phase: Phase, tokens: int, outputs: int) -> Values:
        """Run ``tokens`` new tokens of row 0 for the logits of the first ``outputs``, the last one repeated."""
        past, indices = len(self._prefixes[0]), np.minimum(np.arange(outputs), tokens - 1)[None]
        call = Batch.of(phase, self._next[:1, :tokens], np.array([past], np.int64), indices)
        return self._run(call)[0].copy(), self._fill_cache(past, tokens)

    def _run(self, call: Batch) -> NDArray[np.float32]:
        """Logits of a call that continues the prefixes, whose states the call before has changed."""
        for row, past in enumerate(call.past_lengths.tolist()):
            self._session.cache.write_states(row, past, self._states[row])
        return self._session.run(self._change(call))

    def _fill_cache(self, past: int, tokens: int) -> NDArray[np.generic]:
        """The cache's contents for ``tokens`` positions of row 0, [tokens, values]."""
        return np.stack(self._session.cache.read_blocks(0, 1, past, past + tokens))


def _same(got: Values, wanted: Values, count: int) -> bool:
    return all(np.array_equal(a[:count], b[:count]) for a, b in zip(got, wanted, strict=True))


def _multiple(sizes: Iterable[int], same: Same) -> int:
    """1 if calls of all sizes agree, 2 if only those of even sizes do, else 0."""
    agree = {size: same(size) for size in sizes}
    if all(agree.values()):
        return 1
    return 2 if all(good for size, good in agree.items() if size % 2 == 0) else 0
