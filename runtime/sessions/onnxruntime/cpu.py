"""ONNX Runtime on the CPU: a graph per phase over the same cache, everything bound once per shape.

The cache and all inputs and outputs live in numpy arrays whose addresses are bound to the graphs, so a decode step
writes a few integers, runs, and reads logits in place.
"""

import mmap
import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # must be set before the library is imported

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import ADAPTERS_FOLDER, HIDDEN, LM_HEAD, LOGIT_ROWS, REPLAY, WEIGHTS_FILE, Geometry, Manifest, version
from llmc.errors import BundleError, GpuError, LlmcError, ResourceError, require
from llmc.runtime.host.machine import cpu_model, return_freed_memory
from llmc.runtime.host.read_ahead import read_ahead, read_once
from llmc.runtime.host.threads import on_leaving, start
from llmc.runtime.kv.host_cache import HostCache, LentCache
from llmc.runtime.sessions.base import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime.factors import RowFactors
from llmc.runtime.sessions.onnxruntime.library import (
    IN_PLACE,
    IN_PLACE_SINCE,
    PACK_TOGETHER,
    inference_session,
    session_options,
)
from llmc.runtime.sessions.onnxruntime.onnx_file import LARGEST_GRAPH, check_weights
from llmc.runtime.sessions.onnxruntime.replay import Named, Replay, States, bind
from llmc.strict import open_regular, read_bytes

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
        if manifest.cache == "bfloat16":
            raise GpuError("a bundle in bfloat16 cannot be run on a CPU; run it on its GPU, or build it with --fp16")
        names = {phase: manifest.graphs[phase.value].file for phase in Phase}
        own = {name: manifest.graphs[name].file for name in (REPLAY, LM_HEAD) if name in manifest.graphs}
        can_wait = version(runtime.__version__) >= version(IN_PLACE_SINCE)
        first = {names[Phase.PREFILL], *own.values()} if can_wait else {*names.values(), *own.values()}
        files = open_graphs(runtime, folder, manifest, sorted(first), threads)
        self._head: Any = files[own[LM_HEAD]] if LM_HEAD in own else None
        self._graphs: dict[str, Any] = {}
        self._keep_graph(Phase.PREFILL, prefill := files[names[Phase.PREFILL]])
        split = manifest.recipe.phases == "split" and manifest.cache != "int8"
        ragged = split or not manifest.geometry.has_states
        self.packs_rows = ragged and _takes(prefill, "new_lengths")
        self._takes_slots = _takes(prefill, "cache_slots")
        self._takes_texts = _takes(prefill, "text_lengths")
        self._takes_embeddings = _takes(prefill, "embeddings")
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
        if batch.new_lengths is not None:
            ends = (batch.past_lengths + batch.new_lengths).tolist()
        if rows > 1 and sequence > 1 and not self.diffuses and (batch.new_lengths is None or not self.packs_rows):
            return self._run_row_by_row(batch)
        if batch.adapters:
            assert self._factors is not None, "adapters are read once the session is open for them"
            if self._factors.make_room(max(self.cache.rows, batch.first_row + rows), batch.adapters):
                self._bound.clear()
            self._factors.fill(batch.first_row, batch.adapters)
        binding = self._bind_buffers(batch)
        binding.input_ids[:] = batch.input_ids
        binding.past_lengths[:] = batch.past_lengths
        binding.logit_indices[:] = batch.logit_indices
        if binding.new_lengths is not None:
            binding.new_lengths[:] = sequence if batch.new_lengths is None else batch.new_lengths
        if batch.embedded is not None:
            binding.embedding_indices[:], binding.embeddings[:] = batch.embedded.indices, batch.embedded.rows
        binding.fill_places(batch, ends)
        self._bind_hidden(binding, batch)
        try:
            binding.session.run_with_iobinding(binding.io, self._options)
            if binding.head is not None:
                self._head.run_with_iobinding(binding.head, self._options)
        except Exception:
            with translate_errors("running the model"):
                raise
        if batch.provisional:
            self._fed = ends[0] - int(batch.past_lengths[0])
        else:
            self.cache.note_computed(batch.first_row, ends)
        self._logits = binding.logits if self._manifest.stage.is_last else binding.io.get_outputs()[-1].numpy()
        self.hidden = binding.hidden
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
        end = _ends_in(graph)
        if (end == LOGIT_ROWS and not _takes(self._head, LOGIT_ROWS)) or (self._manifest.stage.is_last and not end):
            raise BundleError(f"{self._folder}: its graphs do not give logits; build the bundle again")
        self._graphs[kind] = graph

    def _graph(self, kind: str) -> Any:
        """The graph for calls of this kind; waits for decode's where a thread opens it."""
        if kind not in self._graphs and self._later is not None:
            self._keep_graph(kind, self._later.result())
        return self._graphs[kind]

    def _bind_hidden(self, binding: "_Binding", batch: Batch) -> None:
        """Bind what a stage behind another one takes, and what one before another hands on."""
        stage, layers = self._manifest.stage, self._manifest.list_layers()
        if stage.number and batch.hidden is not None:
            bind(binding.io.bind_input, f"hidden.{layers.start}", batch.hidden)
        if not stage.is_last:
            binding.io.bind_output(f"hidden.{layers.stop}", "cpu")

    def _bind_buffers(self, batch: Batch) -> "_Binding":
        """Buffers bound for calls of this shape; those of short calls are kept, of long ones only the last."""
        kind = ADAPTERS_FOLDER if batch.adapters else batch.phase
        embeddings = 0 if batch.embedded is None else len(batch.embedded.rows)
        rows, sequence = batch.input_ids.shape
        shape = (kind, rows, sequence, batch.logit_indices.shape[1], batch.first_row, embeddings, batch.provisional)
        bound = self._bound
        if shape in bound.kept:
            bound.kept.move_to_end(shape)
            return bound.kept[shape]
        if bound.long is not None and bound.long[0] == shape:
            return bound.long[1]
        kept = batch.input_ids.size <= max(SHARED_OUTPUTS, self.cache.rows)
        if not kept:
            bound.long = None  # its outputs go before new ones come
        binding = self._bind_anew(kind, batch, self._room_for(batch, shared=kept))
        if not kept:
            bound.long = (shape, binding)
            return binding
        bound.kept[shape] = binding
        if len(bound.kept) > KEPT_BINDINGS:
            bound.kept.popitem(last=False)
        return binding

    def _bind_anew(self, kind: str, batch: Batch, room: NDArray[np.float32]) -> "_Binding":
        rows, sequence = batch.input_ids.shape
        caches = self._list_caches(batch.first_row, rows)
        graph = self._graph(kind)
        binding = _Binding(graph, batch, caches)
        if _ends_in(graph) == LOGIT_ROWS:
            binding.bind_head(self._head, room, self._manifest.geometry.hidden_size)
        elif self._manifest.stage.is_last:
            binding.bind_logits(room)
        diffuses, packs = self._manifest.geometry.diffusion is not None, _takes(graph, "new_lengths")
        asked = {"new_lengths": packs, "seen_lengths": diffuses, "text_lengths": self._takes_texts}
        binding.bind_numbers(name for name, wanted in asked.items() if wanted)
        if self._takes_embeddings:
            embeddings = 0 if batch.embedded is None else len(batch.embedded.rows)
            binding.bind_embeddings(max(1, embeddings), self._manifest.geometry)
        if shape := self._shape_hidden(batch):
            binding.bind_hidden(shape)
        if batch.adapters and self._factors is not None:
            binding.bind_inputs(self._factors.views(batch.first_row, rows))
        if self._takes_slots:
            binding.bind_slots(self.cache.arrays[0].shape[2])
        if batch.provisional and self._replay is not None:
            states = [(tensor, array) for tensor, array in caches if tensor.kind == "state"]
            binding.bind_outputs(self._replay.outputs(sequence, states))
        return binding

    def _shape_hidden(self, batch: Batch) -> tuple[int, ...]:
        """The shape of the hidden states that a call gives, () if none."""
        geometry, borders = self._manifest.geometry, self._manifest.hidden
        if geometry.head is not None:
            return (*batch.logit_indices.shape, geometry.head.own_width)
        rows = batch.logit_indices if geometry.shares else batch.input_ids
        return (*rows.shape, len(borders) * geometry.hidden_size) if borders else ()

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
        self.kept: OrderedDict[Any, _Binding] = OrderedDict()
        self.long: tuple[Any, _Binding] | None = None
        self.logits: NDArray[np.float32] | None = None


class _Binding:
    """Arrays for one shape of call, bound to a graph by address; ``caches`` are its rows of the cache's tensors."""

    logits: NDArray[np.float32]

    def __init__(self, session: Any, batch: Batch, caches: States) -> None:
        self.session = session
        self.io = session.io_binding()
        self.input_ids = np.empty(batch.input_ids.shape, np.int64)
        self.past_lengths = np.empty(batch.past_lengths.shape, np.int64)
        self.logit_indices = np.empty(batch.logit_indices.shape, np.int64)
        self.head: Any = None
        self.hidden: NDArray[np.float32] | None = None
        self.new_lengths: NDArray[np.int64] | None = None
        self.positions: NDArray[np.int64] | None = None
        self.seen_lengths: NDArray[np.int64] | None = None
        self.text_lengths: NDArray[np.int64] | None = None
        self._caches = caches
        for name in ("input_ids", "past_lengths", "logit_indices"):
            bind(self.io.bind_input, name, getattr(self, name))
        for tensor, array in caches:
            bind(self.io.bind_input, tensor.past, array)
            if tensor.present:
                bind(self.io.bind_output, tensor.present, array)

    def bind_logits(self, logits: NDArray[np.float32]) -> None:
        self.logits = logits
        bind(self.io.bind_output, "logits", logits)

    def bind_head(self, head: Any, logits: NDArray[np.float32], width: int) -> None:
        """A graph whose head is another one gives that the rows that logits are made of."""
        rows = np.empty((*self.logit_indices.shape, width), np.float32)
        bind(self.io.bind_output, LOGIT_ROWS, rows)
        self.head, self.logits, self._rows = head.io_binding(), logits, rows
        bind(self.head.bind_input, LOGIT_ROWS, rows)
        bind(self.head.bind_output, "logits", logits)

    def bind_numbers(self, names: Iterable[str]) -> None:
        """Bind the inputs with a number for each row that the graph asks for."""
        for name in names:
            setattr(self, name, np.empty(self.past_lengths.shape, np.int64))
            bind(self.io.bind_input, name, getattr(self, name))

    def fill_places(self, batch: Batch, ends: Sequence[int]) -> None:
        """Fill in positions, how many of a row are seen, and how long its text is, where the graph asks; ``ends`` are
        those of the tokens."""
        if self.text_lengths is not None:
            self.text_lengths[:] = ends if batch.text_lengths is None else batch.text_lengths
        if self.seen_lengths is not None:
            self.seen_lengths[:] = ends if batch.seen_lengths is None else batch.seen_lengths
        if self.positions is not None:
            plain = batch.past_lengths[:, None] + np.arange(batch.input_ids.shape[1])
            self.positions[:] = plain if batch.positions is None else batch.positions

    def bind_hidden(self, shape: tuple[int, ...]) -> None:
        """A graph that gives hidden states to a draft head, or a head's own."""
        self.hidden = np.empty(shape, np.float32)
        bind(self.io.bind_output, HIDDEN, self.hidden)

    def bind_inputs(self, arrays: Iterable[Named]) -> None:
        """The graph for adapters takes those of each row."""
        for name, array in arrays:
            bind(self.io.bind_input, name, array)

    def bind_outputs(self, arrays: Iterable[Named]) -> None:
        """A provisional call writes its states, and what they are computed from, elsewhere than into its row."""
        for name, array in arrays:
            bind(self.io.bind_output, name, array)

    def bind_slots(self, capacity: int) -> None:
        """A graph that was made for TensorRT asks which positions of the cache it may look at: all."""
        self.slots = np.arange(capacity)
        bind(self.io.bind_input, "cache_slots", self.slots)

    def bind_embeddings(self, rows: int, geometry: Geometry) -> None:
        """A graph that takes rows in place of tokens' embeddings wants at least one, which none of the tokens needs;
        and positions, where these have several axes."""
        self.embedding_indices = np.full(self.input_ids.shape, -1, np.int64)
        self.embeddings = np.zeros((rows, geometry.row_width), np.float32)
        bind(self.io.bind_input, "embedding_indices", self.embedding_indices)
        bind(self.io.bind_input, "embeddings", self.embeddings)
        if geometry.vision is not None and geometry.vision.axes:
            self.positions = np.empty((geometry.vision.axes, *self.input_ids.shape), np.int64)
            bind(self.io.bind_input, "positions", self.positions)


def _takes(graph: Any, name: str) -> bool:
    return graph is not None and any(value.name == name for value in graph.get_inputs())


def _ends_in(graph: Any) -> str:
    """The output of a graph that is no cache, hidden state or the like: logits, or the rows that a head multiplies."""
    names = {value.name for value in graph.get_outputs()}
    return next((name for name in ("logits", LOGIT_ROWS) if name in names), "")


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
