"""The seam to an engine: a session runs calls on a KV cache."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Geometry
from llmc.errors import BundleError
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.sessions.adapters import Adapter
from llmc.runtime.vision.rows import Embedded


class Phase(str, Enum):
    """The graph that a call belongs to; a bundle may serve both with one."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = str.__hash__  # of equal texts, and without a call of Python's


@dataclass(frozen=True)
class Batch:
    """One call: new tokens for the cache rows ``first_row`` ... ``first_row + B - 1``.

    A session is done with the arrays when ``run`` returns; the caller may write them anew.

    Attributes:
        input_ids: int64 [B, S], right-padded where ``new_lengths`` says so.
        past_lengths: int64 [B], valid positions in the cache before this call.
        logit_indices: int64 [B, O], which of the S new positions get logits, ascending; O may be 0.
        new_lengths: int64 [B], how many of each row's new tokens count; default: all. States stay as the last of them
            left them. In a call of several tokens for several rows they differ only if the session packs rows.
        embedded: of a call of one row with images, the rows in place of some tokens' own embeddings.
        positions: int64 [3, B, S], where a model's positions have several axes and images stand in a row; else each
            token's is its place in the row.
        adapters: one for each row, None for a row without; empty where no row has one.
        provisional: of a call of one row, whether its states stay as they are until :meth:`Session.accept`.
        hidden: float32 [B, S, H], for a stage behind another one, what that handed on; [1, T, H], of the T tokens that
            count, where the session packs rows and the call is of prefill.
        text_lengths: int64 [B], of a model whose ropes switch how long each row's text is; default: up to its last new
            token.
        seen_lengths: int64 [B], of a diffusion model how many positions of each row its tokens see; default: those up
            to its last new token.
    """

    phase: Phase
    input_ids: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    logit_indices: NDArray[np.int64]
    first_row: int = 0
    new_lengths: NDArray[np.int64] | None = None
    embedded: Embedded | None = None
    positions: NDArray[np.int64] | None = None
    adapters: tuple[Adapter | None, ...] = ()
    provisional: bool = False
    hidden: NDArray[np.float32] | None = None
    seen_lengths: NDArray[np.int64] | None = None
    text_lengths: NDArray[np.int64] | None = None
    begun: Any = None


class Session(ABC):
    """A model loaded into an engine, bound to a KV cache. Not thread-safe: the caller serialises calls.

    Attributes:
        cache: the KV cache that calls read and write.
        engine_version: of the engine's library in use.
        processor: name of the CPU or GPU: results hold for it and not for another.
        changes_kernels: whether calls of several tokens may get other kernels, which round otherwise, while it runs.
        packs_rows: whether rows of a call of prefill may have different numbers of new tokens.
        turns: groups of rows whose steps it computes at the same time, if those are begun ahead of :meth:`run`.
        exact: whether hidden states keep their bits on the way through a model in stages.
        diffuses: whether the model is one that fills masks: all tokens of a call see one another.
        hidden: float32 [B, S, W] of the last call, if the bundle gives hidden states to a draft head, [B, O, W] where
            layers read caches of others, and [B, O, N] of such a head; the next call may reuse the array.
    """

    cache: KVCache
    engine_version: str
    processor: str
    changes_kernels = False
    packs_rows = False
    turns = 1
    exact = True
    hidden: NDArray[np.float32] | None = None

    def __init__(self, geometry: Geometry) -> None:
        self._logits: NDArray[np.float32] = np.empty((0, 0, geometry.vocab_size), np.float32)
        self.diffuses = geometry.diffusion is not None

    @abstractmethod
    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab], of a stage before the last hidden states; the next call may reuse the array, so
        copy what must outlive it."""

    def rank(self, batch: Batch) -> NDArray[Any]:
        """:meth:`run` where the most probable tokens may suffice: its logits, or [B, O] of
        :class:`llmc.runtime.sampling.ranked.Ranked`, which the next call makes worthless."""
        return self.run(batch)

    def begin(self, batch: Batch) -> Batch:
        """Start a call in the stages before the last, with one token of each row; the call to :meth:`run` later."""
        return batch

    def accept(self, row: int, past: int, tokens: int) -> None:
        """Let the states of a row, after ``past`` tokens, be those after the first ``tokens`` of the last call, which
        was provisional.
        Raises BundleError: the engine keeps no states."""
        raise BundleError("this engine keeps no states; run the bundle on a CPU")

    def open_adapters(self) -> None:
        """Get ready for calls with adapters, unless it is. Any thread may call this while others run.
        Raises BundleError: the engine has no such calls."""
        raise BundleError("this engine runs no adapters beside a model; merge the adapter at export instead")

    @abstractmethod
    def close(self) -> None:
        """Free the engine and the cache."""

    def _run_row_by_row(self, batch: Batch) -> NDArray[np.float32]:
        names = ["input_ids", "past_lengths", "logit_indices", "new_lengths", "hidden", "seen_lengths", "text_lengths"]
        found = []
        for r in range(len(batch.input_ids)):
            arrays = {name: getattr(batch, name)[r : r + 1] for name in names if getattr(batch, name) is not None}
            own = None if batch.positions is None else batch.positions[:, r : r + 1]
            found.append(self.run(replace(batch, first_row=batch.first_row + r, positions=own, **arrays)).copy())
        self._logits = np.concatenate(found)
        return self._logits
