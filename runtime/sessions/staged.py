"""A model in stages as one session: hidden states go from stage to stage, and each keeps the caches of its layers.

The last stage, whose logits are many, runs in the engine's own process, those before it wherever they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import BUNDLE_MANIFEST, STAGE_FOLDER, Manifest, Stage, read_bundle, sha256_file
from llmc.bundle.model.cache import CacheKind
from llmc.errors import BundleError
from llmc.runtime.kv.cache import KVCache, Layout, Values, tensors_of
from llmc.runtime.kv.host_cache import LETS_GO
from llmc.runtime.sessions import open_engine
from llmc.runtime.sessions.base import Batch, Session

# Tokens of a prompt that a stage computes at a time, while the next one computes those before: a tile of attention, so
# that each has the bits that it has in the whole call.
PIECE = 64
# Times the weights of a model that its slowest stage may read for all groups. A step of R rows takes A + B R in one
# piece, and g groups take g f A + f B R in a stage of the share f: less if A / B < R (1 - f) / (g f - 1), and A / B was
# 2 to 4 as measured. So two groups with f = 2 / 3 gain from 4 rows on.
MOST_READ = 4 / 3
# Bits above the point of a token's largest value on the wire: float16 ends at 65,504.
WIRE_BITS = 15
Wire = tuple[NDArray[np.float16], NDArray[np.int32]]


def read_stage(folder: Path, number: int, wanted: str) -> Manifest:
    """The manifest of a stage before the last, which is in ``folder``; ``wanted`` is its SHA-256.
    Raises BundleError: it is missing, or of another build."""
    place = folder / STAGE_FOLDER.format(number)
    if not place.is_dir():
        raise BundleError(
            f"{place} is not there, and {folder} is a model in stages; put this stage there, or start Ray with "
            f"--resources '{{\"{place.name}\": 1}}' on the box that has it, and serve the model with --ray"
        )
    manifest = read_bundle(place)
    if sha256_file(place / BUNDLE_MANIFEST) != wanted:
        raise BundleError(f"{place} is of another build than {folder}; copy both from one build")
    return manifest


def read_stages(folder: Path, manifest: Manifest) -> dict[Path, Manifest]:
    """The manifests of the stages before the last, by their folders; see :func:`read_stage`."""
    before = enumerate(manifest.stage.before)
    return {folder / STAGE_FOLDER.format(stage[0]): read_stage(folder, *stage) for stage in before}


def find_stages(folder: Path, manifest: Manifest) -> dict[int, Manifest | None]:
    """The stages of the model that a bundle answers for, by number: their manifests, None where the folder is elsewhere
    (see :func:`read_stage`). Of a model in one piece, and of a stage before the last, its own alone."""
    before = enumerate(manifest.stage.before)
    here = {it[0]: read_stage(folder, *it) if (folder / STAGE_FOLDER.format(it[0])).is_dir() else None for it in before}
    return {**here, manifest.stage.number: manifest}


def plan_together(manifest: Manifest, stages: Mapping[Path, Manifest]) -> Manifest:
    """The manifest of the last stage with the memory of all, in one process."""
    return replace(manifest, memory=manifest.memory.add_stages(stage.memory for stage in stages.values()))


def pack(hidden: NDArray[np.float32]) -> Wire:
    """Hidden states [..., H] in float16, each token's largest value near 2^15, and the powers of two [..., 1] that it
    takes: half the bytes, of values of any size."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are refused at the end
        exponents = WIRE_BITS - np.frexp(np.abs(hidden).max(-1, keepdims=True))[1]
        return np.ldexp(hidden, exponents).astype(np.float16), exponents


def unpack(wire: Wire) -> NDArray[np.float32]:
    """The hidden states of :func:`pack`, rounded by 2^-11 of each value, or 2^-39 of their token's largest."""
    values, exponents = wire
    found: NDArray[np.float32] = np.ldexp(values.astype(np.float32), -exponents)
    return found


def ask(session: Session, name: str, arguments: Sequence[Any]) -> Any:
    """Call a method of a stage's cache, or its session's ``accept``."""
    return getattr(session if name == "accept" else session.cache, name)(*arguments)


class Stages:
    """The stages before the last, in this process: to check them, and where memory has room for all.
    ``read`` are their manifests, if they were; ``exact``: hidden states go on in float32; ``apart``: they compute while
    others do."""

    exact, apart = True, False

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int, read: Mapping[Path, Manifest] | None = None
    ) -> None:
        read = read_stages(folder, manifest) if read is None else read
        self._sessions = [open_engine(place, stage, threads) for place, stage in read.items()]

    def submit(self, batch: Batch) -> Any:
        """Start a call through all of them, while others are under way; a promise for :meth:`fetch`."""
        for session in self._sessions:
            batch = batch.feed(hidden=session.run(batch))
        return batch.feeds["hidden"]

    def fetch(self, promise: Any) -> Any:
        """The hidden states that a call came to."""
        return promise

    def ask(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """:func:`ask` each of them with arguments of its own; what they return, in their order."""
        return [ask(session, name, given) for session, given in zip(self._sessions, arguments, strict=True)]

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class StagedCache(KVCache):
    """The caches of all stages as one; what is read of them is in the layout of the whole model's."""

    def __init__(self, manifest: Manifest, own: Session, stages: Stages) -> None:
        super().__init__(replace(manifest, stage=Stage()))
        self._own, self._stages = own, stages
        self._lets_go = LETS_GO and self._narrowest > 0 and self.can_rewind
        each = (replace(manifest, stage=Stage(n, manifest.stage.borders)) for n in range(len(manifest.stage.borders)))
        self._parts = [tensors_of(one.list_caches()) for one in each]

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """:func:`ask` every stage."""
        return [*self._stages.ask(name, [arguments] * (len(self._parts) - 1)), ask(self._own, name, arguments)]

    def _hand_out(self, name: str, values: Values, *arguments: int, count: int, kind: CacheKind = "kv") -> None:
        """:func:`ask` every stage to take what it has of the values of ``count`` positions, or of states."""
        sizes = [Layout(tensors, kind).size(count) for tensors in self._parts]
        given = [(*arguments, part) for part in np.split(values, np.cumsum(sizes)[:-1])]
        self._stages.ask(name, given[:-1])
        ask(self._own, name, given[-1])

    def _grow(self, rows: int, capacity: int) -> None:
        self.ask("reserve", rows, capacity)

    def let_go(self, row: int, end: int) -> None:
        """See :class:`KVCache`."""
        self.ask("let_go", row, end)
        super().let_go(row, end)

    def read_states(self, row: int, end: int) -> Values:
        """See :class:`KVCache`."""
        found: Values = np.concatenate(self.ask("read_states", row, end))
        return found

    def write_states(self, row: int, end: int, values: Values) -> None:
        """See :class:`KVCache`."""
        self._hand_out("write_states", values, row, end, count=0, kind="state")
        self._note_written(row, end)

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        self.ask("copy", source, target, start, end)

    def _swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        self.ask("swap", one, its_end, other, others_end)

    def _read(self, row: int, start: int, end: int, values: Values) -> None:
        np.concatenate(self.ask("read", row, start, end), out=values)

    def _write(self, row: int, start: int, end: int, values: Values) -> None:
        self._hand_out("write", values, row, start, end, count=end - start)


class StagedSession(Session):
    """The last stage, ``own``, behind those before it."""

    def __init__(self, manifest: Manifest, own: Session, stages: Stages) -> None:
        super().__init__(manifest.geometry)
        self._own, self._stages, self.packs_rows, self.exact = own, stages, own.packs_rows, stages.exact
        self.cache: StagedCache = StagedCache(manifest, own, stages)
        self.engine_version, self.processor = own.engine_version, own.processor
        self.turns = count_turns(manifest) if stages.apart else 1

    def begin(self, batch: Batch) -> Batch:
        """See :class:`llmc.runtime.sessions.base.Session`."""
        return replace(batch, begun=self._stages.submit(batch))

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`."""
        self.cache.begin(batch.first_row, batch.past_lengths.tolist(), batch.input_ids.shape[1])
        pieces = [self.begin(piece) for piece in divide(batch)] if batch.begun is None else [batch]
        found = [self._own.run(piece.feed(hidden=self._stages.fetch(piece.begun))).copy() for piece in pieces]
        if not batch.provisional:
            self.cache.note_computed(batch.first_row, (batch.past_lengths + batch.counts).tolist())
        return found[0] if len(found) == 1 else np.concatenate(found, 1)

    def accept(self, row: int, past: int, tokens: int) -> None:
        """See :class:`llmc.runtime.sessions.base.Session`."""
        self.cache.ask("accept", row, past, tokens)
        self.cache.note_computed(row, [past + tokens])

    def close(self) -> None:
        self._stages.close()
        self._own.close()
        self.cache.close()


def count_turns(manifest: Manifest) -> int:
    """Groups of rows that take turns in the stages without keeping the slowest of them longer than all take in a row:
    its share of the weights, which it reads for each group, comes to :data:`MOST_READ` in all at most."""
    parts = [manifest.geometry.of_layers(manifest.list_layers(n)) for n in range(len(manifest.stage.borders))]
    weights = [sum(linear.outputs * linear.inputs for linear in part.linears) for part in parts]
    return min(len(parts), int(MOST_READ * sum(weights) / max(weights)))


def divide(batch: Batch) -> list[Batch]:
    """A long call of one row in pieces of :data:`PIECE` tokens or somewhat more, so that no stage waits for all."""
    rows, sequence = batch.input_ids.shape
    starts = [*range(0, sequence - PIECE + 1, PIECE)]
    if rows > 1 or batch.provisional or "new_lengths" in batch.feeds or len(starts) < 2:
        return [batch]
    ends = [*starts[1:], sequence]
    return [batch.cut(slice(0, 1), slice(start, end)) for start, end in zip(starts, ends, strict=True)]
