"""The part of TensorRT's session without a device: calls cut to the engine's profiles."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import EngineConfig, Profile
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.tensorrt.engine import DECODE, PREFILL


@dataclass(frozen=True)
class Piece:
    """One call of the engine's share of a batch."""

    profile: int
    # of the batch, from ... to.
    rows: slice
    tokens: slice
    outputs: NDArray[np.int64]  # places of its logits among those of these rows


def pieces(batch: Batch, config: EngineConfig) -> Iterator[Piece]:
    """Cut a batch into calls that the engine's profiles take.

    One token of many rows goes to decode, several tokens go to prefill row by row, chunk by chunk. Logits at more
    places of a chunk than prefill gives make the chunk shorter; places ascend.
    """
    rows, sequence = batch.input_ids.shape
    count = batch.logit_indices.shape[1]
    if sequence == 1 and count <= 1:
        for start in range(0, rows, config.decode.batch):
            yield Piece(DECODE, slice(start, min(start + config.decode.batch, rows)), slice(0, 1), np.arange(count))
        return
    for row in range(rows):
        yield from _chunks(row, batch.logit_indices[row], sequence, config.prefill)


def _chunks(row: int, indices: NDArray[np.int64], sequence: int, most: Profile) -> Iterator[Piece]:
    start = 0
    while start < sequence:
        end = min(start + most.sequence, sequence)
        places = np.flatnonzero((indices >= start) & (indices < end))[: most.outputs + 1]
        if places.size > most.outputs:
            end, places = int(indices[places[-1]]), places[:-1]
        yield Piece(PREFILL, slice(row, row + 1), slice(start, end), places)
        start = end
