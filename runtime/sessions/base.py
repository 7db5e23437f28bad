"""The seam to an engine: a session runs calls on a KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Geometry
from llmc.bundle.contract import INPUTS
from llmc.bundle.model.kinds import takes_whole_texts
from llmc.errors import BundleError
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.sessions.adapters import Adapter

Ids = NDArray[np.int64]
Feeds = Mapping[str, NDArray[Any]]


class Phase(str, Enum):
    """The graph that a call belongs to; a bundle may serve both with one."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = str.__hash__  # of equal texts, and without a call of Python's


@dataclass(frozen=True)
class Batch:
    """One call: new tokens for the cache rows ``first_row`` ... ``first_row + B - 1``.

    A session is done with the arrays when ``run`` returns; the caller may write them anew.
    """

    phase: Phase
    # arrays by the names of INPUTS. Every call has `input_ids` int64 [B, S], `past_lengths` int64 [B] and
    # `logit_indices` int64 [B, O], ascending, where O may be 0. Graphs that ask for others get the plain ones of the
    # table unless the call brings them; a session ignores what no graph asks for. `new_lengths` of a call of several
    # tokens for several rows differ only if the session packs rows; `hidden` is then [1, T, H].
    feeds: Feeds
    first_row: int = 0
    adapters: tuple[Adapter | None, ...] = ()  # one for each row, None for a row without; empty where no row has one
    provisional: bool = False  # of a call of one row, whether its states stay as they are until accept
    begun: Any = None  # what begin left for the call

    @classmethod
    def of(cls, phase: Phase, ids: Ids, past: Ids, outputs: Ids, first_row: int = 0, **more: NDArray[Any]) -> "Batch":
        """A call with ``input_ids``, ``past_lengths`` and ``logit_indices``, and ``more`` by name."""
        return cls(phase, {"input_ids": ids, "past_lengths": past, "logit_indices": outputs, **more}, first_row)

    @property
    def input_ids(self) -> Ids:
        return self.feeds["input_ids"]

    @property
    def past_lengths(self) -> Ids:
        return self.feeds["past_lengths"]

    @property
    def logit_indices(self) -> Ids:
        return self.feeds["logit_indices"]

    @property
    def counts(self) -> list[int]:
        """New tokens of each row that count."""
        rows, tokens = self.input_ids.shape
        return self.feeds["new_lengths"].tolist() if "new_lengths" in self.feeds else [tokens] * rows

    def feed(self, **more: NDArray[Any]) -> "Batch":
        """This call with more feeds."""
        return replace(self, feeds={**self.feeds, **more})

    def feed_rows(self, brought: Sequence[Feeds]) -> "Batch":
        """This call with what its first rows bring, [..., 1, ...] each; a row without a feed that another has gets a
        plain one."""
        if len(self.input_ids) == 1:
            return self.feed(**brought[0])
        more = dict[str, NDArray[Any]]()
        for name, sample in {name: array for feeds in brought for name, array in feeds.items()}.items():
            contract, rows = INPUTS[name], len(self.input_ids)
            shape = [rows if axis == "batch" else size for axis, size in zip(contract.shape, sample.shape, strict=True)]
            more[name] = np.empty(shape, contract.type)
            contract.fill(more[name], self.feeds)
            for row, feeds in enumerate(brought):
                if name in feeds:
                    contract.cut(more[name], slice(row, row + 1), slice(None))[:] = feeds[name]
        return self.feed(**more)

    def cut(self, rows: slice, tokens: slice | None = None) -> "Batch":
        """The part of this call for some rows or, of one row, for some tokens and the logits of these."""
        feeds = {name: INPUTS[name].cut(array, rows, tokens or slice(None)) for name, array in self.feeds.items()}
        if tokens is not None:
            wanted = feeds["logit_indices"]
            feeds["logit_indices"] = wanted[(tokens.start <= wanted) & (wanted < tokens.stop)][None] - tokens.start
            feeds["past_lengths"] = feeds["past_lengths"] + tokens.start
        first = self.first_row + (rows.start or 0)
        return replace(self, feeds=feeds, first_row=first, adapters=self.adapters[rows])


class Session(ABC):
    """A model loaded into an engine, bound to a KV cache. Not thread-safe: the caller serialises calls.

    Attributes:
        cache: the KV cache that calls read and write.
        engine_version: of the engine's library in use.
        processor: name of the CPU or GPU: results hold for it and not for another.
        changes_kernels: whether calls of several tokens may get other kernels, which round otherwise, while it runs.
        packs_rows: whether rows of a call of prefill may have different numbers of new tokens.
        turns: groups of rows whose steps it computes at the same time, if those are begun ahead of :meth:`run`.
        exact: whether hidden states keep their bits on the way from box to box.
        sees_all: whether all tokens of a call see one another.
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
        self.sees_all = takes_whole_texts(geometry)

    @abstractmethod
    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab], of a stage before the last hidden states; the next call may reuse the array, so
        copy what must outlive it."""

    def run_ranked(self, batch: Batch) -> NDArray[Any]:
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
        rows = range(len(batch.input_ids))
        self._logits = np.concatenate([self.run(batch.cut(slice(row, row + 1))).copy() for row in rows])
        return self._logits
