"""A model in stages as one session: hidden states go from stage to stage, and each keeps the caches of its layers.

The last stage, whose logits are many, runs in the engine's own process; the way to those before it is a
:class:`Stages`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import BUNDLE_MANIFEST, STAGE_FOLDER, Manifest, read_bundle, sha256_file
from llmc.errors import BundleError, UsageError
from llmc.runtime.host.integrity import check_files
from llmc.runtime.kv.budget import check_load
from llmc.runtime.kv.cache import KVCache, Layout, Values, tensors_of
from llmc.runtime.kv.host_cache import LETS_GO
from llmc.runtime.sessions import open_engine
from llmc.runtime.sessions.base import Batch, Session

# Tokens of a prompt that a stage takes at a time, so that the next one begins meanwhile: whole tiles of attention, so
# that each token's bits are those of the whole call.
PIECE = 64


class Stages(Protocol):
    """The stages before the last, wherever they are."""

    def submit(self, batch: Batch) -> Any:
        """Start a call through all of them; several may be under way."""

    def fetch(self, promise: Any) -> NDArray[np.float32]:
        """The hidden states of a call that was submitted."""

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """:func:`ask` each of them with its own arguments; what they return, in their order."""

    def close(self) -> None:
        """Free them."""


# What opens them for the last stage in a folder, its manifest and a number of threads.
OpenStages = Callable[[Path, Manifest, int], Stages]


class StagesHere:
    """All stages in this process, to check them, and where memory has room for all."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        before = manifest.stage.before if manifest.stage else ()
        self._sessions = [open_stage(folder, number, wanted, threads) for number, wanted in enumerate(before)]

    def submit(self, batch: Batch) -> NDArray[np.float32]:
        hidden = batch.hidden
        for session in self._sessions:
            hidden = session.run(replace(batch, hidden=hidden))
        assert hidden is not None
        return hidden.copy()

    def fetch(self, promise: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = promise
        return found

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [ask(session, name, given) for session, given in zip(self._sessions, arguments, strict=True)]

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def open_stage(folder: Path, number: int, wanted: str, threads: int) -> Session:
    """The session of a stage before the last, in its place beside that.

    Raises:
        BundleError: it is not there, is damaged, or of another build than ``wanted``, the SHA-256 of its manifest.
        ResourceError: it does not fit into memory.
    """
    place = folder / STAGE_FOLDER.format(number)
    manifest = read_bundle(place)
    if sha256_file(place / BUNDLE_MANIFEST) != wanted:
        raise BundleError(f"{place} is of another build than {folder}; copy both from one build")
    check_load(place, manifest, manifest.limits.max_context)
    check_files(place, manifest, None)
    return open_engine(place, manifest, threads)


def ask(session: Session, name: str, arguments: tuple[Any, ...]) -> Any:
    """Call a method of a session's cache, or its own ``accept``."""
    return getattr(session if name == "accept" else session.cache, name)(*arguments)


class StagedCache(KVCache):
    """The caches of all stages as one; what is read of them is in the layout of the whole model's."""

    def __init__(self, manifest: Manifest, stages: Stages, own: Session) -> None:
        super().__init__(replace(manifest, stage=None))
        assert manifest.stage is not None
        self._stages, self._own = stages, own
        self._lets_go = LETS_GO and self._narrowest > 0 and self.can_rewind
        each = (replace(manifest, stage=replace(manifest.stage, number=n)) for n in range(len(manifest.stage.borders)))
        self._tensors_of_stages = [tensors_of(one.caches) for one in each]

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """:func:`ask` every stage."""
        return self._ask(name, [arguments] * len(self._tensors_of_stages))

    def _ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [*self._stages.ask(name, arguments[:-1]), ask(self._own, name, arguments[-1])]

    def _divide(self, values: Values, count: int, kind: Any = "kv") -> Iterator[Values]:
        """What each stage has of values of ``count`` positions, or of states."""
        start = 0
        for tensors in self._tensors_of_stages:
            size = Layout(tensors, kind).size(count)
            yield values[start : start + size]
            start += size

    def _grow(self, rows: int, capacity: int) -> None:
        self.ask("reserve", rows, capacity)

    def let_go(self, row: int, end: int) -> None:
        """See :class:`KVCache`."""
        self.ask("let_go", row, end)
        super().let_go(row, end)

    def read_states(self, row: int, end: int) -> Values:
        """See :class:`KVCache`."""
        self._check_resumable(row, end)
        found: Values = np.concatenate(self.ask("read_states", row, end))
        return found

    def write_states(self, row: int, end: int, values: Values) -> None:
        """See :class:`KVCache`."""
        self._ask("write_states", [(row, end, part) for part in self._divide(values, 0, "state")])
        self._note_written(row, end)

    def read_blocks(self, row: int, size: int, start: int, end: int) -> list[Values]:
        """See :class:`KVCache`; one question for all of them."""
        if not end > start:
            return []
        return self._layout.split(self.read(row, start, end), end - start, size)

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        self.ask("copy", source, target, start, end)

    def _swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        self.ask("swap", one, its_end, other, others_end)

    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        np.concatenate(self.ask("read", row, start, end), out=values)

    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        self._ask("write", [(row, start, end, part) for part in self._divide(values, end - start)])


class StagedSession(Session):
    """The stages of a model, the last of which is in ``folder``.
    Raises BundleError: ``folder`` holds another stage than the last; LlmcError: as :func:`open_engine`."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int, stages: Stages) -> None:
        super().__init__(manifest.geometry)
        assert manifest.stage is not None
        self._stages = stages
        self._own = open_engine(folder, manifest, threads)
        self.cache = StagedCache(manifest, stages, self._own)
        self.engine_version, self.processor = self._own.engine_version, self._own.processor
        self.packs_rows = self._own.packs_rows

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`."""
        sequence = batch.input_ids.shape[1]
        ends = self.cache.begin(batch.first_row, batch.past_lengths.tolist(), sequence)
        if batch.new_lengths is not None:
            ends = (batch.past_lengths + batch.new_lengths).tolist()
        if batch.embedded is not None or batch.adapters:
            raise UsageError("a model in stages takes text alone, without adapters; leave images and adapters out")
        pieces = [(piece, self._stages.submit(piece)) for piece in divide(batch)]
        found = []
        for piece, promise in pieces:
            logits = self._own.run(replace(piece, hidden=self._stages.fetch(promise)))
            found.append(logits if len(pieces) == 1 else logits.copy())
        if not batch.provisional:
            self.cache.note_computed(batch.first_row, ends)
        return found[0] if len(found) == 1 else np.concatenate(found, 1)

    def accept(self, row: int, past: int, tokens: int) -> None:
        """See :class:`llmc.runtime.sessions.base.Session`."""
        self.cache.ask("accept", row, past, tokens)

    def close(self) -> None:
        self._stages.close()
        self._own.close()
        self.cache.close()


def divide(batch: Batch) -> list[Batch]:
    """A long call of one row in pieces of :data:`PIECE` tokens, so that no stage waits for the whole of it."""
    sequence = batch.input_ids.shape[1]
    starts = range(0, max(1, sequence - PIECE + 1), PIECE)
    if len(batch.input_ids) > 1 or batch.provisional or batch.new_lengths is not None or len(starts) == 1:
        return [batch]
    found = []
    for start in starts:
        end = sequence if start == starts[-1] else start + PIECE
        wanted = batch.logit_indices[(batch.logit_indices >= start) & (batch.logit_indices < end)][None]
        ids, past = batch.input_ids[:, start:end], batch.past_lengths + start
        found.append(replace(batch, input_ids=ids, past_lengths=past, logit_indices=wanted - start))
    return found
