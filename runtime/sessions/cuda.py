"""ONNX Runtime on NVIDIA GPUs: one graph for both phases over a cache on the device, everything bound by address.

Inputs go up and outputs come down through pinned memory, on the stream that the engine runs on, too. A step that comes
again is recorded by ONNX Runtime as a CUDA graph and replayed: the graph of the bundle computes all that depends on
lengths on the device, and takes the only number that attention's host code needs from the cache's shape. So a
recording holds for as long as the cache keeps its size and place.

Not run on a GPU yet: tests run this session on a double of CUDA, with ONNX Runtime's CPU kernels behind it.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import GpuError, LlmcError, RequestError, UsageError
from llmc.runtime.cuda import Driver, open_driver
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.cuda_provider import (
    NOT_RECORDED,
    Binding,
    check_provider,
    import_onnxruntime_gpu,
    open_graph,
    translated,
)
from llmc.runtime.sessions.device_blocks import Block, Part, inputs_of, outputs_of, size_of
from llmc.runtime.sessions.device_cache import DeviceCache
from llmc.runtime.sessions.device_memory import check_memory

log = logging.getLogger(__name__)

# Calls of at most so many tokens and logits, or as many as the cache may have rows, are kept bound and are recorded:
# steps, and steps with drafted tokens. In longer ones the device's work hides what it takes to start it.
SHORT_CALL = 16
KEPT_BINDINGS = 64
# Not every version of ONNX Runtime can let a recording go, and each holds some memory of the driver.
MOST_RECORDINGS = 512
FIRST_CAPACITY = 256  # positions that a cache has at least, unless the bundle has fewer


@dataclass(frozen=True)
class _Call:
    """All that tells one call from another once its numbers are left out; a recording has it baked in."""

    rows: int
    sequence: int
    outputs: int
    first_row: int

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.sequence


class CudaSession:
    """A :class:`llmc.runtime.sessions.base.Session` on ONNX Runtime's CUDA provider.

    Args:
        folder: the bundle.
        manifest: of the bundle.
        threads: of no use here.
        driver: the GPU; default: the first one that is visible. It is closed with the session.
        runtime: onnxruntime, or what behaves alike.

    Raises:
        BundleError: ONNX Runtime is too old, or refuses the graph.
        MissingExtraError, GpuError: library, driver or GPU are missing or unsupported.
        ResourceError: the GPU's memory does not suffice.
    """

    substitutes = False  # both phases run the same graph

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int, *, driver: Driver | None = None, runtime: Any = None
    ) -> None:
        self._folder = folder
        self._geometry = manifest.geometry
        self._limits = manifest.limits
        self._lost: str | None = None
        self._stream = 0  # none yet
        self._logits: NDArray[np.float32] = np.empty((0, 0, self._geometry.vocab_size), np.float32)
        self._hidden: NDArray[np.float32] = np.empty((0, 0, self._geometry.hidden_size), np.float32)
        self._resources = contextlib.ExitStack()
        minimum = manifest.target.engine_minimum
        self._runtime = import_onnxruntime_gpu(minimum) if runtime is None else runtime
        check_provider(self._runtime, minimum)
        self._driver = open_driver() if driver is None else driver
        self._later(self._driver.close)
        try:
            with self._guarded("loading"):
                self._open(manifest)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------- loading

    def _open(self, manifest: Manifest) -> None:
        driver, g = self._driver, self._geometry
        positions = min(FIRST_CAPACITY, self._limits.max_context)
        self._device_memory = check_memory(self._folder, driver, manifest.device, positions)
        driver.activate()
        self._stream = driver.stream()
        self._later(driver.destroy_stream, self._stream)
        self._dtype = np.dtype(manifest.cache)
        self._make_blocks()
        self._cache = DeviceCache(driver, g, self._dtype.itemsize, self._stream, 1, self._dtype)
        self._later(self._cache.close)
        graph = self._folder / manifest.graphs["decode"].file
        self._graph = open_graph(self._runtime, graph, self._stream, self._dtype.name)
        self._bound: OrderedDict[_Call, Binding] = OrderedDict()
        self._recordings = 0
        self._later(self._forget_graph)  # before the memory that it is bound to, and its stream

    def _make_blocks(self) -> None:
        """Room for the inputs and outputs of short calls, and for those of a chunk that wants as few logits."""
        self._short = max(SHORT_CALL, self._limits.max_batch)
        self._chunk = max(self._short, self._limits.prefill_chunk)
        sizes = [size_of(inputs_of(self._short, 1, 1)), size_of(inputs_of(1, self._chunk, self._short))]
        self._blocks = self._block(max(sizes)), self._block(size_of(self._outputs_of(self._short, 1)))

    def _block(self, size: int) -> Block:
        block = Block(self._driver, size)
        self._later(block.close)
        return block

    def _forget_graph(self) -> None:
        self._unbind()
        del self._graph

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function`` when the session closes, the last one first; on a lost GPU nothing can be freed."""

        def quietly() -> None:
            with contextlib.suppress(LlmcError):
                function(*arguments)

        self._resources.callback(quietly)

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Say what failed on the GPU, and once its context was lost, say so at once."""
        if self._lost is not None:
            raise GpuError(self._lost, lost=True)
        try:
            with translated(f"{self._folder}: {doing}"):
                yield
        except GpuError as error:
            if not error.lost and self._stream:
                self._ask_the_driver(error)
            self._lost = str(error) if error.lost else None
            raise

    def _ask_the_driver(self, error: GpuError) -> None:
        """A library's own failure may be the first sign of a context that is gone: then say that instead."""
        try:
            self._driver.synchronize(self._stream)
        except GpuError as found:
            if found.lost:
                self._lost = str(found)
                raise found from error

    def close(self) -> None:
        """Free the graph, the cache and the GPU; twice is harmless."""
        self._logits, self._hidden = self._logits[:0], self._hidden[:0]  # they may lie in memory that goes
        self._resources.close()

    # ------------------------------------------------------------------------------------------------- the cache

    @property
    def engine_version(self) -> str:
        """Version of ONNX Runtime."""
        return str(self._runtime.__version__)

    @property
    def processor(self) -> str:
        """The GPU's name, its compute capability and its driver's CUDA version."""
        return str(self._driver.device)

    @property
    def rows(self) -> int:
        """Rows that the cache holds now."""
        return self._cache.rows

    @property
    def capacity(self) -> int:
        """Positions that the cache holds now, per row."""
        return self._cache.capacity

    @property
    def hidden(self) -> NDArray[np.float32]:
        """What the head read in the last call, float32 [B, O, hidden]; the next call may reuse the array."""
        return self._hidden

    @property
    def device_memory(self) -> int | None:
        """Bytes of the GPU's memory that were free when the bundle was loaded, with what the driver holds itself."""
        return self._device_memory

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to at least ``rows`` x ``capacity``; what it holds is kept.

        Raises:
            RequestError: more than the bundle was built for.
            ResourceError: memory does not suffice; the cache keeps its size.
            GpuError: the GPU failed.
        """
        self.resize(max(rows, self.rows), max(capacity, self.capacity))

    def resize(self, rows: int, capacity: int, used: Sequence[int] | None = None) -> None:
        """Make the cache exactly ``rows`` x ``capacity``; see :class:`llmc.runtime.sessions.base.Session`.

        Raises:
            RequestError: more than the bundle was built for.
            UsageError: ``used`` does not have one number for each row of the cache.
            ResourceError: memory does not suffice; the cache keeps its size.
            GpuError: the GPU failed.
        """
        if rows > self._limits.max_batch or capacity > self._limits.max_context:
            raise RequestError(
                f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
                f"{self._limits.max_batch} x {self._limits.max_context}; build with larger ones"
            )
        with self._guarded("resizing the cache"):
            self._unbind()  # addresses and shapes change
            self._cache.resize(rows, capacity, used)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions ``start`` ... ``end - 1`` of the row ``source`` to the same ones of ``target``.

        Raises:
            UsageError: a row or position that the cache does not have.
            GpuError: the GPU failed.
        """
        with self._guarded("copying in the cache"):
            self._cache.copy(source, target, start, end)

    def read(self, row: int, start: int, end: int) -> NDArray[Any]:
        """A copy of keys and values [2 * layers, kv_heads, end - start, head_dim] of positions of a row.

        Raises:
            UsageError: a row or position that the cache does not have.
            GpuError: the GPU failed.
        """
        with self._guarded("reading the cache"):
            return self._cache.read(row, start, end)

    def write(self, row: int, start: int, values: NDArray[Any]) -> None:
        """Put ``values``, as :meth:`read` returns them, into the positions from ``start`` on.

        Raises:
            UsageError: a row or position that the cache does not have, or values of another shape or type.
            GpuError: the GPU failed.
        """
        with self._guarded("writing the cache"):
            self._cache.write(row, start, values)

    # ------------------------------------------------------------------------------------------------- running

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`.

        Raises:
            UsageError: rows or positions that the cache does not have.
            ResourceError: the GPU's memory does not suffice.
            GpuError: the GPU failed; ``lost`` tells that every later call will.
        """
        rows, sequence = batch.input_ids.shape
        ends = [past + sequence for past in batch.past_lengths.tolist()]
        if batch.first_row + rows > self.rows or max(ends) > self.capacity:
            raise UsageError(
                f"rows {batch.first_row} ... {batch.first_row + rows - 1} up to position {max(ends)} are asked for, "
                f"the cache has {self.rows} rows of {self.capacity}; reserve room first"
            )
        if rows > 1 and sequence > 1:  # attention's kernels take several tokens of one row, or one of each
            return self._run_row_by_row(batch)
        with self._guarded("running the model"):
            self._run(batch)
        self._cache.computed(batch.first_row, ends)
        return self._logits

    def _run_row_by_row(self, batch: Batch) -> NDArray[np.float32]:
        parts = [(self.run(row).copy(), self._hidden.copy()) for row in _row_by_row(batch)]
        self._logits, self._hidden = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return self._logits

    def _run(self, batch: Batch) -> None:
        """One call of the graph, which gives at least one row of logits."""
        rows, sequence = batch.input_ids.shape
        wanted = batch.logit_indices.shape[1]
        call = _Call(rows, sequence, max(1, wanted), batch.first_row)
        with self._memory_for(call) as blocks:
            binding = self._binding(call, blocks)
            binding.fill(batch)
            binding.run(self._stream)
            self._driver.synchronize(self._stream)
            found = [binding.outputs[name][:, :wanted] for name in ("logits", "hidden_states")]
            self._logits, self._hidden = found if blocks is self._blocks else [array.copy() for array in found]

    def full_logits(self) -> NDArray[np.float32]:
        """All logits of the last call, float32 [B, O, vocab]: this session always has them."""
        return self._logits

    # ------------------------------------------------------------------------------------------------- bindings

    @contextlib.contextmanager
    def _memory_for(self, call: _Call) -> Iterator[tuple[Block, Block]]:
        """Blocks of inputs and of outputs: the session's own, or larger ones for this call alone."""
        if call.tokens <= self._chunk and call.rows * call.outputs <= self._short:
            yield self._blocks
            return
        with contextlib.ExitStack() as stack:
            blocks = []
            for places in self._places(call):
                blocks.append(Block(self._driver, size_of(places)))
                stack.callback(blocks[-1].close)
            yield blocks[0], blocks[1]

    def _binding(self, call: _Call, blocks: tuple[Block, Block]) -> Binding:
        """The graph bound for a call; short calls are kept, with the recordings that were made of them."""
        if blocks is not self._blocks or call.tokens > self._short:
            return self._bind(call, blocks, None)
        if call not in self._bound:
            if len(self._bound) == KEPT_BINDINGS:
                self._bound.popitem(last=False)[1].close()
            self._bound[call] = self._bind(call, blocks, self._next_recording)
        self._bound.move_to_end(call)
        return self._bound[call]

    def _bind(self, call: _Call, blocks: tuple[Block, Block], recorder: Callable[[], int] | None) -> Binding:
        g = self._geometry
        addresses = [self._cache.address(tensor, call.first_row) for tensor in range(self._cache.tensors)]
        shape = (call.rows, g.kv_heads, self.capacity, g.head_dim)
        return Binding(self._graph, blocks, self._places(call), (addresses, shape, self._dtype), recorder)

    def _places(self, call: _Call) -> tuple[dict[str, Part], dict[str, Part]]:
        inputs = inputs_of(call.rows, call.sequence, call.outputs)
        return inputs, self._outputs_of(call.rows, call.outputs)

    def _outputs_of(self, rows: int, outputs: int) -> dict[str, Part]:
        return outputs_of(rows, outputs, self._geometry.hidden_size, self._geometry.vocab_size, 0)

    def _next_recording(self) -> int:
        """A number that no recording had before, or the one for none."""
        if self._recordings == MOST_RECORDINGS:
            log.info("%d CUDA graphs were recorded; further calls are not", MOST_RECORDINGS)
            return NOT_RECORDED
        self._recordings += 1
        return self._recordings

    def _unbind(self) -> None:
        while self._bound:
            self._bound.popitem()[1].close()


def _row_by_row(batch: Batch) -> Iterator[Batch]:
    for r in range(len(batch.input_ids)):
        row = slice(r, r + 1)
        yield replace(
            batch,
            input_ids=batch.input_ids[row],
            past_lengths=batch.past_lengths[row],
            logit_indices=batch.logit_indices[row],
            first_row=batch.first_row + r,
        )
