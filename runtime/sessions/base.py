"""What the generation loop asks of an engine."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
    """

    phase: Phase
    input_ids: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    logit_indices: NDArray[np.int64]
    first_row: int = 0


class Session(Protocol):
    """A model loaded into an engine, with its KV cache. Not thread-safe: the caller serialises calls."""

    @property
    def engine_version(self) -> str:
        """Version of the engine library in use."""

    @property
    def substitutes(self) -> bool:
        """Whether a phase runs on the other phase's graph, because this machine cannot run its own."""

    @property
    def capacity(self) -> int:
        """Positions that the cache holds now, per row."""

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to at least ``rows`` rows of ``capacity`` positions; what it holds is kept."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab]; the array is reused by the next call of the same shape."""

    def close(self) -> None:
        """Free the engine and the cache."""
