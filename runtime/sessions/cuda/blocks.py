"""Inputs and outputs of a call on the device: where they lie in memory that never moves, and how they get there.

All inputs go up in one copy and the candidates of all rows come down in one, from and to pinned memory; so do logits,
where they are asked for. On an integrated GPU the device works on the pinned memory itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import MOST_CANDIDATES, SUM_EXP, TOP_IDS, TOP_LOGITS
from llmc.bundle.contract import BROUGHT
from llmc.errors import LlmcError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.kv.device_cache import ALIGNMENT, host_array
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.ranked import Ranked
from llmc.runtime.sessions.base import Batch

INT64: np.dtype[Any] = np.dtype(np.int64)
FLOAT: np.dtype[Any] = np.dtype(np.float32)
Shape = tuple[int, ...]
Arrays = dict[str, tuple[Shape, np.dtype[Any]]]


@dataclass(frozen=True)
class Part:
    """An array's place in a block of memory."""

    offset: int
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.offset + int(np.prod(self.shape)) * self.dtype.itemsize


def lay_out(arrays: Arrays) -> dict[str, Part]:
    """Places of arrays one after another, each on the boundary that kernels want."""
    parts, offset = {}, 0
    for name, (shape, dtype) in arrays.items():
        parts[name] = Part(offset, shape, dtype)
        offset = -(-parts[name].end // ALIGNMENT) * ALIGNMENT
    return parts


def inputs_of(rows: int, sequence: int, outputs: int) -> dict[str, Part]:
    """Places of what every call brings."""
    sizes = {"batch": rows, "sequence": sequence, "outputs": outputs}
    return lay_out({it.name: (tuple(sizes[axis] for axis in it.shape), INT64) for it in BROUGHT})


def fill_inputs(inputs: Mapping[str, NDArray[Any]], batch: Batch) -> None:
    """Put a batch into its places; without places of logits, ask for those of the first token."""
    for name, array in inputs.items():
        array[:] = batch.feeds[name] if batch.feeds[name].size else 0


def outputs_of(rows: int, outputs: int, vocab_size: int) -> dict[str, Part]:
    """Places of the candidates, which every call hands over, and behind them of the logits, which may stay there."""
    count = min(MOST_CANDIDATES, vocab_size)
    return lay_out(
        {
            TOP_LOGITS: ((rows, outputs, count), FLOAT),
            TOP_IDS: ((rows, outputs, count), INT64),
            SUM_EXP: ((rows, outputs, 1), FLOAT),
            "logits": ((rows, outputs, vocab_size), FLOAT),
        }
    )


def size_of(parts: Mapping[str, Part]) -> int:
    return max(part.end for part in parts.values())


class Block:
    """Pinned host memory and its counterpart on the device, one and the same where the GPU is integrated."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._shared = driver.device.integrated
        self.host = driver.alloc_host(size)
        try:
            self.device = driver.device_address(self.host) if self._shared else driver.alloc(size)
        except LlmcError:
            driver.free_host(self.host)
            raise

    def upload(self, size: int, stream: int) -> None:
        """Queue the copy of the first ``size`` bytes to the device."""
        if not self._shared:
            self._driver.copy(self.device, self.host, size, stream)

    def download(self, start: int, end: int, stream: int) -> None:
        """Queue the copy of the bytes from ``start`` to ``end`` from the device."""
        if not self._shared:
            self._driver.copy(self.host + start, self.device + start, end - start, stream)

    def array(self, part: Part) -> NDArray[Any]:
        return host_array(self.host + part.offset, part.shape, part.dtype)

    def close(self) -> None:
        if not self._shared:
            self._driver.free(self.device)
        self._driver.free_host(self.host)


class Outputs:
    """The outputs of a call, at ``places`` of :func:`outputs_of` in ``block``; candidates come down with every call."""

    def __init__(self, block: Block, places: Mapping[str, Part]) -> None:
        self._block, self._place = block, places["logits"]
        self._arrays = {name: block.array(part) for name, part in places.items()}
        self.logits: NDArray[np.float32] = self._arrays["logits"]

    def download(self, stream: int) -> None:
        """Queue the copy of the candidates."""
        self._block.download(0, self._place.offset, stream)

    def download_logits(self, stream: int) -> None:
        self._block.download(self._place.offset, self._place.end, stream)

    def download_row(self, row: int, output: int, stream: int) -> None:
        size = self.logits[row, output].nbytes
        start = self._place.offset + (row * self.logits.shape[1] + output) * size
        self._block.download(start, start + size, stream)

    def list_ranked(self, outputs: int, fetch: Callable[[int, int], Logits]) -> NDArray[Any]:
        """Candidates [B, ``outputs``]; ``fetch`` gets the logits of a row's output."""
        rows, _, vocab_size = self.logits.shape
        ids, values, sums = (self._arrays[name] for name in (TOP_IDS, TOP_LOGITS, SUM_EXP))
        ranked = np.empty((rows, outputs), object)
        for row in range(rows):
            for i in range(outputs):
                whole = partial(fetch, row, i)
                ranked[row, i] = Ranked(ids[row, i], values[row, i], float(sums[row, i, 0]), vocab_size, whole)
        return ranked
