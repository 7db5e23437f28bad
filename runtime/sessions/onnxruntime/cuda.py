"""ONNX Runtime on NVIDIA GPUs: one graph for both phases over a cache on the device, everything bound by address.

Inputs go up and outputs come down through pinned memory, on the stream that the engine runs on, too. A step that comes
again is recorded by ONNX Runtime as a CUDA graph and replayed: the graph of the bundle computes all that depends on
lengths on the device, and takes the only number that attention's host code needs from the cache's shape. So a
recording holds for as long as the cache keeps its size and place.

Never run on a GPU: tests run this session on a double of CUDA, with ONNX Runtime's CPU kernels behind it, and on the
real CUDA provider without a device.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import LlmcError, require
from llmc.runtime.host.cuda import Driver, open_driver
from llmc.runtime.sessions.base import Batch, Phase
from llmc.runtime.sessions.cuda.blocks import Block, Part, inputs_of, size_of
from llmc.runtime.sessions.cuda.session import DeviceSession
from llmc.runtime.sessions.onnxruntime.cuda_provider import (
    NOT_RECORDED,
    Binding,
    check_provider,
    open_graph,
    translate_errors,
)
from llmc.runtime.sessions.onnxruntime.onnx_file import check_weights

log = logging.getLogger(__name__)

# Calls of at most so many tokens and logits, or as many as the cache may have rows, are kept bound and are recorded:
# steps, and steps with drafted tokens. In longer ones the device's work hides what it takes to start it.
SHORT_CALL = 16
KEPT_BINDINGS = 64
MOST_RECORDINGS = 512  # each holds some memory of the driver until the session is closed


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


class CudaSession(DeviceSession):
    """A :class:`llmc.runtime.sessions.base.Session` on ONNX Runtime's CUDA provider.

    Args:
        folder, manifest: of the bundle.
        threads: of no use here.
        device: the number of the GPU among those that are visible.
        driver: of the GPU; default: opened, and closed with the session.
        runtime: onnxruntime, or what behaves alike.

    Raises:
        BundleError: ONNX Runtime is too old, or refuses the graph.
        MissingExtraError, GpuError: library, driver or GPU are missing or unsupported.
        ResourceError: the GPU's memory does not suffice.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int,
        *,
        device: int = 0,
        driver: Driver | None = None,
        runtime: Any = None,
    ) -> None:
        self._runtime = require("onnxruntime", "gpu") if runtime is None else runtime
        check_provider(self._runtime, manifest.target.engine_minimum)
        self.engine_version = str(self._runtime.__version__)
        super().__init__(folder, manifest, open_driver(device) if driver is None else driver)
        with self._free_on_error():
            self._open(manifest)

    # ------------------------------------------------------------------------------------------------- loading

    def _open(self, manifest: Manifest) -> None:
        self._begin(self._limits.prefill_chunk)
        self._make_blocks()
        self._make_cache()
        graph = self._folder / manifest.graphs["decode"].file
        check_weights(graph, manifest.files)
        self._graph = open_graph(self._runtime, graph, self._driver.device.index, self._stream, self.cache.dtype.name)
        self._bound: OrderedDict[_Call, Binding] = OrderedDict()
        self._recordings = 0
        self._thread = threading.get_ident()
        self._close_later(self._forget_graph)  # before the memory that it is bound to, and its stream
        self._take_memory()

    def _take_memory(self) -> None:
        """Run the longest call once: ONNX Runtime's arena then has what shorter ones need.

        It gives nothing back, and no piece of it serves a larger request: prompts that come in the order of their
        lengths would take 15 times as much (a decoder of two layers, chunks of 2,048).
        """
        chunk = self._limits.prefill_chunk
        self.cache.reserve(1, chunk)
        last = np.full((1, self._short), chunk - 1)
        self._run_call(Batch.of(Phase.PREFILL, np.zeros((1, chunk), np.int64), np.zeros(1, np.int64), last), whole=True)
        self.cache.close()

    def _make_blocks(self) -> None:
        """Room for the inputs and outputs of short calls, and for those of a chunk that wants as few logits."""
        self._short = max(SHORT_CALL, self._limits.max_batch)
        self._chunk = max(self._short, self._limits.prefill_chunk)
        sizes = [size_of(inputs_of(self._short, 1, 1)), size_of(inputs_of(1, self._chunk, self._short))]
        self._blocks = self._block(max(sizes)), self._block(size_of(self._outputs_of(self._short, 1)))

    def _forget_graph(self) -> None:
        self._forget_addresses()
        with contextlib.suppress(LlmcError):  # a lost GPU; ONNX Runtime frees its memory below
            self._driver.activate()
        del self._graph

    def _translate_errors(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return translate_errors(doing, self._folder)

    # ------------------------------------------------------------------------------------------------- running

    def _run(self, batch: Batch, whole: bool) -> NDArray[Any]:
        rows, sequence = batch.input_ids.shape
        ends = self.cache.begin(batch.first_row, batch.past_lengths.tolist(), sequence)
        if rows > 1 and sequence > 1:  # attention's kernels take several tokens of one row, or one of each
            return self._run_row_by_row(batch)
        with self._guard_context("running the model"):
            self._logits = self._run_call(batch, whole)
        self.cache.note_computed(batch.first_row, ends)
        return self._logits

    def _run_call(self, batch: Batch, whole: bool) -> NDArray[Any]:
        self._driver.activate()
        if self._thread != threading.get_ident():  # whose recordings ONNX Runtime does not share with other threads
            self._thread = threading.get_ident()
            self._forget_addresses()
        rows, sequence = batch.input_ids.shape
        wanted = batch.logit_indices.shape[1]
        call = _Call(rows, sequence, max(1, wanted), batch.first_row)
        with self._memory_for(call) as blocks:
            binding = self._bind_call(call, blocks)
            binding.fill(batch)
            binding.run(self._driver, self._stream)
            stays = blocks is self._blocks
            if whole or not stays:
                binding.outputs.download_logits(self._stream)
            self._driver.synchronize(self._stream)
            if not whole and stays:
                return self._rank(binding.outputs, wanted)
            logits = binding.outputs.logits[:, :wanted]
            return logits if stays else logits.copy()

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

    def _bind_call(self, call: _Call, blocks: tuple[Block, Block]) -> Binding:
        """The graph bound for a call; short calls are kept, with the recordings that were made of them."""
        if blocks is not self._blocks or call.tokens > self._short:
            return self._bind(call, blocks, None)
        if call not in self._bound:
            if len(self._bound) == KEPT_BINDINGS:
                self._bound.popitem(last=False)
            self._bound[call] = self._bind(call, blocks, self._next_recording)
        self._bound.move_to_end(call)
        return self._bound[call]

    def _bind(self, call: _Call, blocks: tuple[Block, Block], recorder: Callable[[], int] | None) -> Binding:
        tensors = self.cache.tensors
        addresses = [self.cache.address(tensor, call.first_row) for tensor in range(len(tensors))]
        shapes = [tensor.of(call.rows, self.cache.capacity) for tensor in tensors]
        caches = list(zip(tensors, addresses, shapes, strict=True))
        return Binding(self._graph, blocks, self._places(call), (caches, self.cache.dtype), recorder)

    def _places(self, call: _Call) -> tuple[dict[str, Part], dict[str, Part]]:
        inputs = inputs_of(call.rows, call.sequence, call.outputs)
        return inputs, self._outputs_of(call.rows, call.outputs)

    def _next_recording(self) -> int:
        """A number that no recording had before, or the one for none."""
        if self._recordings == MOST_RECORDINGS:
            log.info("%d CUDA graphs were recorded; further calls are not", MOST_RECORDINGS)
            return NOT_RECORDED
        self._recordings += 1
        return self._recordings

    def _forget_addresses(self) -> None:
        self._bound.clear()
