"""ONNX Runtime on the CPU: a graph per phase over the same cache, everything bound once per shape.

The cache and all inputs and outputs live in numpy arrays whose addresses are bound to the graphs, so a decode step
writes a few integers, runs, and reads logits in place.
"""

import logging
import mmap
import os
import platform

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # must be set before the library is imported

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import ADAPTERS_FOLDER, LM_HEAD, LOGIT_ROWS, REPLAY, WEIGHTS_FILE, Manifest, version
from llmc.bundle.model.names import HIDDEN
from llmc.errors import BundleError, GpuError, LlmcError, ResourceError, require
from llmc.runtime.host.machine import cpu_model, return_freed_memory, saturates
from llmc.runtime.host.read_ahead import read_ahead, read_once
from llmc.runtime.host.threads import on_leaving, start
from llmc.runtime.kv.host_cache import HostCache, LentCache
from llmc.runtime.sessions.base import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime.binding import Binding
from llmc.runtime.sessions.onnxruntime.factors import RowFactors
from llmc.runtime.sessions.onnxruntime.library import (
    IN_PLACE,
    IN_PLACE_SINCE,
    PACK_TOGETHER,
    inference_session,
    session_options,
)
from llmc.runtime.sessions.onnxruntime.onnx_file import LARGEST_GRAPH, check_weights
from llmc.runtime.sessions.onnxruntime.replay import Replay, States
from llmc.strict import open_regular, read_bytes

log = logging.getLogger(__name__)

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
        self._folder, self._manifest, self._threads = folder, manifest, threads
        if manifest.target.unsigned and platform.machine() == "x86_64" and not saturates():
            log.warning("%s was built on a CPU without VNNI; built again on this one, it reads prompts faster", folder)
        if manifest.cache == "bfloat16":
            raise GpuError("a bundle in bfloat16 cannot be run on a CPU; run it on its GPU, or build it with --fp16")
        names = {phase: manifest.graphs[phase.value].file for phase in Phase}
        own = {name: manifest.graphs[name].file for name in (REPLAY, LM_HEAD) if name in manifest.graphs}
        can_wait = version(runtime.__version__) >= version(IN_PLACE_SINCE)
        first = {names[Phase.PREFILL], *own.values()} if can_wait else {*names.values(), *own.values()}
        files = open_graphs(runtime, folder, manifest, sorted(first), threads)
        self._last_hidden = f"hidden.{manifest.list_layers().stop}"  # what a part of a model gives in place of logits
        self._head: Any = files[own[LM_HEAD]] if LM_HEAD in own else None
        self._graphs: dict[str, Any] = {}
        self._keep_graph(Phase.PREFILL, prefill := files[names[Phase.PREFILL]])
        split = manifest.recipe.phases == "split" and manifest.cache != "int8"
        ragged = split or not manifest.geometry.has_states
        self.packs_rows = ragged and _takes(prefill, "new_lengths")
        self._options = runtime.RunOptions()
        on_leaving(self, partial(setattr, self._options, "terminate", True))
        self._bound = _Bound()
        self._factors: RowFactors | None = None
        self._replay = Replay(files[own[REPLAY]]) if REPLAY in own else None
        self._fed = 0  # tokens of the last provisional call
        self.cache: HostCache = HostCache(manifest)
        self.cache.on_move.append(self._bound.clear)
        self._later: Future[Any] | None = None
        if names[Phase.DECODE] in files:
            self._keep_graph(Phase.DECODE, files[names[Phase.DECODE]])
        else:  # the first prompt does not need it
            self._later = open_later(runtime, folder, manifest, names[Phase.DECODE], threads)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab], or hidden states; see :class:`llmc.runtime.sessions.base.Session`."""
        rows, sequence = batch.input_ids.shape
        ends = self.cache.begin(batch.first_row, batch.past_lengths.tolist(), sequence)
        if ragged := "new_lengths" in batch.feeds:
            ends = (batch.past_lengths + batch.feeds["new_lengths"]).tolist()
        if rows > 1 and sequence > 1 and not self.sees_all and not (ragged and self.packs_rows):
            return self._run_row_by_row(batch)
        if batch.adapters:
            assert self._factors is not None, "adapters are read once the session is open for them"
            if self._factors.make_room(max(self.cache.rows, batch.first_row + rows), batch.adapters):
                self._bound.clear()
            self._factors.fill(batch.first_row, batch.adapters)
        binding = self._bind_buffers(batch)
        binding.fill(batch.feeds)
        gives_logits = "logits" in binding.results
        if not gives_logits:  # the size of hidden states is known once the call was run
            binding.io.bind_output(self._last_hidden, "cpu")
        try:
            binding.run(self._options)
        except Exception:
            with translate_errors("running the model"):
                raise
        if batch.provisional:
            self._fed = ends[0] - int(batch.past_lengths[0])
        else:
            self.cache.note_computed(batch.first_row, ends)
        self._logits = binding.results["logits"] if gives_logits else binding.io.get_outputs()[-1].numpy()
        self.hidden = binding.results.get(HIDDEN)
        return self._logits

    def accept(self, row: int, past: int, tokens: int) -> None:
        """See :class:`llmc.runtime.sessions.base.Session`."""
        if self._replay is not None:
            states = [(tensor, array) for tensor, array in self._list_caches(row, 1) if tensor.kind == "state"]
            with translate_errors("going back over drafts"):
                self._replay.accept(tokens, self._fed, states, self._options)
        self.cache.note_computed(row, [past + tokens])

    def borrow(self, cache: HostCache) -> None:
        """Read, of a draft head, the keys and values of its model's cache from now on, and write nothing."""
        self.cache = LentCache(self._manifest, cache)
        cache.on_move.append(self._bound.clear)

    def open_adapters(self) -> None:
        graph = self._manifest.adapter_graph
        if graph is None or self._factors is not None:
            return
        runtime = import_onnxruntime(self._manifest.target.engine_minimum)
        found = open_graphs(runtime, self._folder, self._manifest, [graph.file], self._threads)[graph.file]
        self._graphs[ADAPTERS_FOLDER], self._factors = found, RowFactors(found)

    def close(self) -> None:
        if self._later is not None:
            wait([self._later])
            self._later = None
        self._bound.clear()
        self.cache.close()
        self._graphs.clear()
        self._replay = self._head = None
        return_freed_memory()

    def _keep_graph(self, kind: str, graph: Any) -> None:
        end = next((name for name in ("logits", LOGIT_ROWS, self._last_hidden) if _gives(graph, name)), "")
        if not end or (end == LOGIT_ROWS and not _takes(self._head, LOGIT_ROWS)):
            raise BundleError(f"{self._folder}: its graphs do not give logits; build the bundle again")
        self._graphs[kind] = graph

    def _graph(self, kind: str) -> Any:
        """The graph for calls of this kind; waits for decode's where a thread opens it."""
        if kind not in self._graphs and self._later is not None:
            self._keep_graph(kind, self._later.result())
        return self._graphs[kind]

    def _bind_buffers(self, batch: Batch) -> Binding:
        """Buffers bound for calls of this shape; those of short calls are kept, of long ones only the last."""
        kind = ADAPTERS_FOLDER if batch.adapters else batch.phase
        shape = (kind, batch.first_row, batch.provisional, *(array.shape for array in batch.feeds.values()))
        short = batch.input_ids.size <= max(SHARED_OUTPUTS, self.cache.rows)
        kept, most = (self._bound.short, KEPT_BINDINGS) if short else (self._bound.long, 1)
        if shape in kept:
            kept.move_to_end(shape)
            return kept[shape]
        if len(kept) == most:
            kept.popitem(last=False)  # first: the outputs of a long call are large
        kept[shape] = self._bind_anew(kind, batch, self._room_for(batch, shared=short))
        return kept[shape]

    def _bind_anew(self, kind: str, batch: Batch, room: NDArray[np.float32]) -> Binding:
        rows, sequence = batch.input_ids.shape
        caches, graph = self._list_caches(batch.first_row, rows), self._graph(kind)
        results = {tensor.present: array for tensor, array in caches if tensor.present}
        for value in graph.get_outputs():
            if value.name == "logits":
                results[value.name] = room
            elif value.name in (LOGIT_ROWS, HIDDEN):
                tokens = sequence if value.shape[1] == "sequence" else batch.logit_indices.shape[1]
                results[value.name] = np.empty((rows, tokens, value.shape[2]), np.float32)
        if batch.provisional and self._replay is not None:  # states, and what they are computed from, go elsewhere
            states = [(tensor, array) for tensor, array in caches if tensor.kind == "state"]
            results |= self._replay.outputs(sequence, states)
        given = {tensor.past: array for tensor, array in caches}
        if batch.adapters and self._factors is not None:
            given |= self._factors.views(batch.first_row, rows)
        attended = next((it.shape[2] for tensor, it in caches if tensor.kind == "kv"), 0)
        binding = Binding(graph, given, results, batch.feeds, attended)
        if LOGIT_ROWS in results:
            binding.head = Binding(self._head, {LOGIT_ROWS: results[LOGIT_ROWS]}, {"logits": room}, {})
            results["logits"] = room
        return binding

    def _list_caches(self, row: int, count: int) -> States:
        rows = slice(row, row + count)
        return [(tensor, array[rows]) for tensor, array in zip(self.cache.tensors, self.cache.arrays, strict=True)]

    def _room_for(self, batch: Batch, *, shared: bool) -> NDArray[np.float32]:
        shape, vocab = batch.logit_indices.shape, self._manifest.geometry.vocab_size
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
        self.short: OrderedDict[Any, Binding] = OrderedDict()
        self.long: OrderedDict[Any, Binding] = OrderedDict()
        self.logits: NDArray[np.float32] | None = None


def _takes(graph: Any, name: str) -> bool:
    return graph is not None and any(value.name == name for value in graph.get_inputs())


def _gives(graph: Any, name: str) -> bool:
    return any(value.name == name for value in graph.get_outputs())


def open_graphs(runtime: Any, folder: Path, manifest: Manifest, names: list[str], threads: int) -> dict[str, Any]:
    """ONNX Runtime's sessions by graph file, opened in parallel: most of the time goes into packing weights."""

    def open_one(path: Path) -> Any:
        check_weights(path, manifest.files)
        with translate_errors("loading", path):
            return inference_session(runtime, str(path), _options(runtime, manifest, threads))

    paths = [folder / name for name in names]
    with read_ahead(folder / WEIGHTS_FILE), ThreadPoolExecutor(len(names)) as pool:  # all of it is about to be packed
        opened = dict(zip(names, pool.map(open_one, paths), strict=True))
    return_freed_memory()
    return opened


def open_later(runtime: Any, folder: Path, manifest: Manifest, name: str, threads: int) -> Future[Any]:
    """ONNX Runtime's session of a graph file, which a thread opens from now on.

    The files are those that are there now, whatever replaces them: the graph is read, and its weights are mapped.

    Raises:
        BundleError: they cannot be read, or the graph names other weights; later, from the result: it is refused.
        ResourceError: no thread can be started; later: memory does not suffice.
    """
    path, weights_file = folder / name, folder / WEIGHTS_FILE
    check_weights(path, manifest.files)
    try:
        content = read_bytes(path, LARGEST_GRAPH)
        with open_regular(weights_file) as file:
            weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} or its weights cannot be read ({error}); build the bundle again") from error
    options = _options(runtime, manifest, threads)
    for entry in (IN_PLACE, PACK_TOGETHER):
        options.add_session_config_entry(*entry)
    options.add_external_initializers_from_files_in_memory([WEIGHTS_FILE], [weights], [len(weights)])
    opened: Future[Any] = Future()

    def open_it() -> None:
        try:
            with translate_errors(f"{path}: loading"), read_ahead(weights_file), read_once(weights):
                graph = inference_session(runtime, content, options)
            graph.weights = weights  # it reads some of them later
            return_freed_memory()
        except BaseException as error:  # noqa: BLE001  # handed to who waits
            opened.set_exception(error)
        else:
            opened.set_result(graph)

    start(open_it, "llmc-open")
    return opened


def _options(runtime: Any, manifest: Manifest, threads: int) -> Any:
    options, levels = session_options(runtime, threads), runtime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL
    if manifest.recipe.phases == "single":
        # Graphs that were made for another engine: weights are dequantized once, and nothing is fused that would
        # compute something else than the graph says.
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


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
def translate_errors(doing: str, path: Path | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, LlmcError) or not _of_engine(error):
            raise
        if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "Failed to allocate memory" in str(error):
            raise ResourceError(
                f"{doing} ran out of memory", "use a smaller --max-context or a smaller model", path=path
            ) from error
        where, reason = f"{path}: " if path else "", " ".join(str(error).split())[:300]
        raise BundleError(f"{where}{doing} failed in ONNX Runtime ({reason})", "build the bundle again") from error
