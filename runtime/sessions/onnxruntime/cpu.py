"""ONNX Runtime on the CPU: a graph per phase over the same cache, everything bound once per shape.

The cache and all inputs and outputs live in numpy arrays whose addresses are bound to the graphs, so a decode step
writes a few integers, runs, and reads logits in place.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # must be set before the library is imported

from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import WEIGHTS_FILE, Manifest, version
from llmc.errors import BundleError, GpuError, LlmcError, ResourceError, require
from llmc.runtime.host.machine import cpu_model, return_freed_memory
from llmc.runtime.host.read_ahead import read_ahead
from llmc.runtime.host.threads import on_leaving
from llmc.runtime.kv.cache import CacheTensor
from llmc.runtime.kv.host_cache import HostCache
from llmc.runtime.sessions.base import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime.library import inference_session, session_options
from llmc.runtime.sessions.onnxruntime.onnx_file import check_weights

# Bindings that are kept beside that of the last long call. A binding takes 0.4 ms to make for 24 layers, 2 % of a step
# of a 0.5B model: worth keeping for every number of rows of a step and of drafted tokens, and not for a chunk's 90 ms.
KEPT_BINDINGS = 32
# Bindings of calls with at most this many tokens (a chunk has more), or as many as the cache has rows, are kept, and
# share memory for their logits: steps, and drafts with the token before them.
SHARED_OUTPUTS = 32


class OnnxRuntimeSession(Session):
    """Sessions of ONNX Runtime for prefill and decode (one object when the bundle has one graph for both)."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        super().__init__(manifest.geometry)
        runtime = import_onnxruntime(manifest.target.engine_minimum)
        self.engine_version, self.processor = str(runtime.__version__), cpu_model()
        self._geometry = manifest.geometry
        if manifest.cache == "bfloat16":
            raise GpuError("a bundle in bfloat16 cannot be run on a CPU; run it on its GPU, or build it with --fp16")
        names = {phase: manifest.graphs[phase.value].file for phase in Phase}
        files = open_graphs(runtime, folder, manifest, sorted(set(names.values())), threads)
        self._graphs = {phase: files[name] for phase, name in names.items()}
        self._takes_lengths = {phase for phase, graph in self._graphs.items() if _takes(graph, "new_lengths")}
        ragged = (manifest.recipe.phases, manifest.cache) == ("split", "float32") or not manifest.geometry.has_states
        self.packs_rows = ragged and Phase.PREFILL in self._takes_lengths
        self._takes_slots = _takes(self._graphs[Phase.DECODE], "cache_slots")
        self._options = runtime.RunOptions()
        on_leaving(self, partial(setattr, self._options, "terminate", True))
        self._bound = _Bound()
        self.cache: HostCache = HostCache(manifest, forget=self._bound.clear)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`."""
        rows, sequence = batch.input_ids.shape
        ends = self.cache.begin(batch.first_row, batch.past_lengths.tolist(), sequence)
        if batch.new_lengths is not None:
            ends = (batch.past_lengths + batch.new_lengths).tolist()
        if rows > 1 and sequence > 1 and (batch.new_lengths is None or not self.packs_rows):
            return self._run_row_by_row(batch)
        binding = self._bind_buffers(batch)
        binding.input_ids[:] = batch.input_ids
        binding.past_lengths[:] = batch.past_lengths
        binding.logit_indices[:] = batch.logit_indices
        if binding.new_lengths is not None:
            binding.new_lengths[:] = sequence if batch.new_lengths is None else batch.new_lengths
        try:
            binding.session.run_with_iobinding(binding.io, self._options)
        except Exception:
            with translate_errors("running the model"):
                raise
        self.cache.note_computed(batch.first_row, ends)
        self._logits = binding.logits
        return self._logits

    def close(self) -> None:
        self._bound.clear()
        self.cache.close()
        self._graphs.clear()

    def _bind_buffers(self, batch: Batch) -> "_Binding":
        """Buffers bound for calls of this shape; those of short calls are kept, of long ones only the last."""
        shape = (batch.phase, *batch.input_ids.shape, batch.logit_indices.shape[1], batch.first_row)
        bound = self._bound
        if shape in bound.kept:
            bound.kept.move_to_end(shape)
            return bound.kept[shape]
        if bound.long is not None and bound.long[0] == shape:
            return bound.long[1]
        rows = slice(batch.first_row, batch.first_row + batch.input_ids.shape[0])
        caches = [(tensor, array[rows]) for tensor, array in zip(self.cache.tensors, self.cache.arrays, strict=True)]
        kept = batch.input_ids.size <= max(SHARED_OUTPUTS, self.cache.rows)
        if not kept:
            bound.long = None  # its outputs go before new ones come
        binding = _Binding(self._graphs[batch.phase], batch, caches, self._room_for(batch, shared=kept))
        if batch.phase in self._takes_lengths:
            binding.bind_lengths()
        if self._takes_slots:
            binding.bind_slots(self.cache.capacity)
        if not kept:
            bound.long = (shape, binding)
            return binding
        bound.kept[shape] = binding
        if len(bound.kept) > KEPT_BINDINGS:
            bound.kept.popitem(last=False)
        return binding

    def _room_for(self, batch: Batch, *, shared: bool) -> NDArray[np.float32]:
        shape, vocab = batch.logit_indices.shape, self._geometry.vocab_size
        if not shared:
            return np.empty((*shape, vocab), np.float32)
        if self._bound.logits is None:
            self._bound.logits = np.empty((max(SHARED_OUTPUTS, self.cache.rows), vocab), np.float32)
        return self._bound.logits[: shape[0] * shape[1]].reshape(*shape, vocab)


class _Bound:
    """Bindings to the cache as it lies now: short calls by shape, the last long one, and their shared outputs."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.kept: OrderedDict[Any, _Binding] = OrderedDict()
        self.long: tuple[Any, _Binding] | None = None
        self.logits: NDArray[np.float32] | None = None


class _Binding:
    """Arrays for one shape of call, bound to a graph by address; ``caches`` are its rows of the cache's tensors."""

    def __init__(
        self, session: Any, batch: Batch, caches: list[tuple[CacheTensor, NDArray[Any]]], logits: NDArray[np.float32]
    ) -> None:
        self.session = session
        self.io = session.io_binding()
        self.input_ids = np.empty(batch.input_ids.shape, np.int64)
        self.past_lengths = np.empty(batch.past_lengths.shape, np.int64)
        self.logit_indices = np.empty(batch.logit_indices.shape, np.int64)
        self.logits = logits
        self.new_lengths: NDArray[np.int64] | None = None
        self._caches = caches
        for name in ("input_ids", "past_lengths", "logit_indices"):
            self._bind(self.io.bind_input, name, getattr(self, name))
        self._bind(self.io.bind_output, "logits", self.logits)
        for tensor, array in caches:
            self._bind(self.io.bind_input, tensor.past, array)
            self._bind(self.io.bind_output, tensor.present, array)

    def bind_lengths(self) -> None:
        """A graph that packs rows asks how many of each row's new tokens count."""
        self.new_lengths = np.empty(self.past_lengths.shape, np.int64)
        self._bind(self.io.bind_input, "new_lengths", self.new_lengths)

    def bind_slots(self, capacity: int) -> None:
        """A graph that was made for TensorRT asks which positions of the cache it may look at: all."""
        self.slots = np.arange(capacity)
        self._bind(self.io.bind_input, "cache_slots", self.slots)

    @staticmethod
    def _bind(bind: Any, name: str, array: NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _takes(graph: Any, name: str) -> bool:
    return any(value.name == name for value in graph.get_inputs())


def open_graphs(runtime: Any, folder: Path, manifest: Manifest, names: list[str], threads: int) -> dict[str, Any]:
    """ONNX Runtime's sessions by graph file."""
    levels = runtime.GraphOptimizationLevel
    plain = {name: folder / name for name in names}
    with read_ahead(folder / WEIGHTS_FILE):  # all of it is about to be packed
        if manifest.recipe.phases != "single":
            return _open_sessions(runtime, plain, manifest.files, threads, levels.ORT_ENABLE_ALL)
        # Graphs that were made for another engine: weights are dequantized once, and nothing is fused that would
        # compute something else than the graph says.
        once = "session.disable_quant_qdq", "1"
        return _open_sessions(runtime, plain, manifest.files, threads, levels.ORT_ENABLE_BASIC, once)


def _open_sessions(
    runtime: Any, paths: dict[str, Path], files: Collection[str], threads: int, level: Any, *config: tuple[str, str]
) -> dict[str, Any]:
    """Open the graphs in parallel, since most of the time goes into packing weights."""

    def open_one(path: Path) -> Any:
        check_weights(path, files)
        options = session_options(runtime, threads)
        options.graph_optimization_level = level
        for key, value in config:
            options.add_session_config_entry(key, value)
        with translate_errors(f"{path}: loading"):
            return inference_session(runtime, str(path), options)

    with ThreadPoolExecutor(len(paths)) as pool:
        opened = dict(zip(paths, pool.map(open_one, paths.values()), strict=True))
    return_freed_memory()
    return opened


def import_onnxruntime(minimum: str) -> Any:
    """The onnxruntime module; MissingExtraError without it, BundleError if it is older than ``minimum``."""
    runtime = require("onnxruntime", "cpu")
    if version(runtime.__version__) < version(minimum):
        raise BundleError(
            f"onnxruntime {runtime.__version__} is too old, {minimum} or newer is needed: pip install -U onnxruntime "
            "(there is no newer one than 1.23 for Python 3.10)"
        )
    return runtime


def _of_engine(error: Exception) -> bool:
    """True for an error of ONNX Runtime's, or of memory; where it quotes a damaged file, its message may be no text."""
    named = type(error).__module__.startswith("onnxruntime") or "Error in execution" in str(error)
    return named or isinstance(error, UnicodeDecodeError | MemoryError)


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, LlmcError) or not _of_engine(error):
            raise
        if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "Failed to allocate memory" in str(error):
            raise ResourceError(f"{doing} ran out of memory; use a smaller --max-context or a smaller model") from error
        reason = " ".join(str(error).split())[:300]
        raise BundleError(f"{doing} failed in ONNX Runtime ({reason}); build the bundle again") from error
