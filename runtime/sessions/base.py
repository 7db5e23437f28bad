"""What the generation loop asks of an engine, and what engines say alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Limits
from llmc.errors import RequestError, UsageError


class Phase(str, Enum):
    """Which graph a call belongs to; a bundle may serve both with one."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Batch:
    """One call: new tokens for the cache rows ``first_row`` ... ``first_row + B - 1``.

    A session is done with the arrays when ``run`` returns; the caller may write them anew.

    Attributes:
        input_ids: int64 [B, S], right-padded.
        past_lengths: int64 [B], valid positions in the cache before this call.
        logit_indices: int64 [B, O], which of the S new positions get logits; O may be 0.
        candidates: how many of the largest logits of each output the caller needs, 0 for all of them. A session may
            then leave all others at -inf; :meth:`Session.full_logits` has them still.
    """

    phase: Phase
    input_ids: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    logit_indices: NDArray[np.int64]
    first_row: int = 0
    candidates: int = 0


class Session(Protocol):
    """A model loaded into an engine, with its KV cache. Not thread-safe: the caller serialises calls."""

    @property
    def engine_version(self) -> str:
        """Version of the engine library in use."""

    @property
    def processor(self) -> str:
        """What computes, by name: results hold for it and not for another."""

    @property
    def substitutes(self) -> bool:
        """Whether a phase runs on the other phase's graph, because this machine cannot run its own."""

    @property
    def rows(self) -> int:
        """Rows that the cache holds now."""

    @property
    def capacity(self) -> int:
        """Positions that the cache holds now, per row."""

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """What the head read in the last call, float32 [B, O, hidden], reused as logits are; None if unknown."""

    @property
    def device_memory(self) -> int | None:
        """Bytes of the GPU's memory that this session may take in all, with what it holds already; None where the
        cache lies in the process. On an integrated GPU they are bytes of the machine's own memory."""

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to at least ``rows`` rows of ``capacity`` positions; what it holds is kept."""

    def resize(self, rows: int, capacity: int, used: Sequence[int] | None = None) -> None:
        """Make the cache exactly ``rows`` x ``capacity``, smaller or larger; what is outside of it is lost.

        ``used`` says how many positions of each row are still needed (default: all that were written): no others are
        kept, so a cache that serves fewer requests than it did gives memory back.
        """

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions ``start`` ... ``end - 1`` of the row ``source`` to the same ones of ``target``."""

    def read(self, row: int, start: int, end: int) -> NDArray[Any]:
        """A copy of the keys and values of positions ``start`` ... ``end - 1``, in the cache's type.

        Its shape is [2 * layers, kv_heads, end - start, head_dim]: key and value of the first layer, of the next...
        """

    def write(self, row: int, start: int, values: NDArray[Any]) -> None:
        """Put what :meth:`read` returned into the positions from ``start`` on."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab]; the next call may reuse the array, so copy what must outlive it."""

    def full_logits(self) -> NDArray[np.float32]:
        """All logits of the last call, float32 [B, O, vocab], also of one that asked for candidates."""

    def close(self) -> None:
        """Free the engine and the cache."""


def check_limits(limits: Limits, rows: int, capacity: int) -> None:
    """Refuse a cache that the bundle was not built for.

    Raises:
        RequestError: with what is asked for, and what the limits are.
    """
    if rows > limits.max_batch or capacity > limits.max_context:
        raise RequestError(
            f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
            f"{limits.max_batch} x {limits.max_context}; build with larger ones"
        )


def check_rows(batch: Batch, rows: int, capacity: int) -> list[int]:
    """The position after the last token of each row of a call, which a cache of ``rows`` x ``capacity`` must have.

    Raises:
        UsageError: rows or positions that the cache does not have.
    """
    count, sequence = batch.input_ids.shape
    ends = [past + sequence for past in batch.past_lengths.tolist()]
    if batch.first_row + count > rows or max(ends) > capacity:
        raise UsageError(
            f"rows {batch.first_row} ... {batch.first_row + count - 1} up to position {max(ends)} are asked for, "
            f"the cache has {rows} rows of {capacity}; reserve room first"
        )
    return ends


def check_range(row: int, start: int, end: int, rows: int, capacity: int) -> None:
    """Refuse positions ``start`` ... ``end`` of a row that a cache of ``rows`` x ``capacity`` does not have.

    Raises:
        UsageError: with what is asked for, and what there is.
    """
    if not (0 <= row < rows and 0 <= start <= end <= capacity):
        raise UsageError(
            f"positions {start} ... {end} of row {row} are asked for, the cache has {rows} rows of {capacity}; "
            "reserve room first"
        )


def kept_positions(written: list[int], used: Sequence[int] | None) -> list[int]:
    """How many positions of each row a resize keeps: those that were ``written``, or fewer where fewer are ``used``.

    Raises:
        UsageError: ``used`` does not have one number for each row.
    """
    if used is None:
        return written
    if len(used) != len(written):
        raise UsageError(f"used has {len(used)} numbers, expected one for each of the cache's {len(written)} rows")
    return list(map(min, written, used))


def contents_end(start: int, values: NDArray[Any], shape: tuple[int, int, int], dtype: np.dtype[Any]) -> int:
    """Where ``values`` [tensors, kv_heads, positions, head_dim] end that are put into a row from ``start`` on.

    Args:
        shape: tensors, kv_heads and head_dim of the cache.
        dtype: of the cache.

    Raises:
        UsageError: they have another shape or type.
    """
    tensors, heads, head_dim = shape
    positions = values.shape[2] if values.ndim == 4 else 0
    if values.shape != (tensors, heads, positions, head_dim) or values.dtype != dtype:
        raise UsageError(
            f"cache contents of {values.dtype} {list(values.shape)} are given, expected {dtype} "
            f"[{tensors}, {heads}, positions, {head_dim}]: they come from another bundle"
        )
    return start + positions


def row_by_row(batch: Batch) -> Iterator[Batch]:
    """A call of each row alone."""
    for r in range(len(batch.input_ids)):
        row = slice(r, r + 1)
        yield replace(
            batch,
            input_ids=batch.input_ids[row],
            past_lengths=batch.past_lengths[row],
            logit_indices=batch.logit_indices[row],
            first_row=batch.first_row + r,
        )
