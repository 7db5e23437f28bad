"""ONNX Runtime on the CPU: a graph per phase over the same cache, everything bound once per shape.

The cache and all inputs and outputs live in numpy arrays whose addresses are bound to the graphs, so a decode step
writes a few integers, runs, and reads logits in place.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # must be set before the library is imported

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import BundleError, LlmcError, RequestError, ResourceError, require
from llmc.runtime import cache, compiled
from llmc.runtime.compiled import LOG_FATAL_ONLY as LOG_FATAL_ONLY
from llmc.runtime.machine import cpu_features
from llmc.runtime.sessions.base import Batch, Phase

log = logging.getLogger(__name__)


class OnnxRuntimeSession:
    """Sessions of ONNX Runtime for prefill and decode (one object when the bundle has one graph for both)."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        self._runtime = import_onnxruntime(manifest.target.engine_minimum)
        self._geometry = manifest.geometry
        self._limits = manifest.limits
        self._cache_type = np.dtype(manifest.cache)
        self._multi_row_prefill = all(graph.multi_row_prefill for graph in manifest.graphs.values())
        names = usable_graphs(manifest)
        self.substitutes = any(names[phase] != manifest.graphs[phase.value].file for phase in Phase)
        files = open_graphs(self._runtime, folder, manifest, sorted(set(names.values())), threads)
        self._graphs = {phase: files[name] for phase, name in names.items()}
        self._cache: list[NDArray[Any]] = []
        self._bound: dict[Any, _Binding] = {}
        self._shape = (0, 0)

    @property
    def engine_version(self) -> str:
        """Version of the installed onnxruntime."""
        return str(self._runtime.__version__)

    @property
    def capacity(self) -> int:
        """Positions that the cache holds now, per row."""
        return self._shape[1]

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to at least ``rows`` x ``capacity``; contents are kept, bindings are made anew.

        Raises:
            RequestError: more than the bundle was built for.
        """
        if rows > self._limits.max_batch or capacity > self._limits.max_context:
            raise RequestError(
                f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
                f"{self._limits.max_batch} x {self._limits.max_context}; build with larger ones"
            )
        rows, capacity = max(rows, self._shape[0]), max(capacity, self._shape[1])
        if (rows, capacity) == self._shape:
            return
        self._bound.clear()
        g = self._geometry
        empty = np.zeros((0, g.kv_heads, 0, g.head_dim), self._cache_type)
        self._cache = self._cache or [empty] * (2 * g.layers)
        # One tensor at a time, so that old and new together exceed the new cache by one tensor only. Where memory
        # ends halfway, some tensors have more room than the rest, and keep it.
        with translated("growing the cache"):
            for i, before in enumerate(self._cache):
                room = (max(rows, before.shape[0]), g.kv_heads, max(capacity, before.shape[2]), g.head_dim)
                grown = np.zeros(room, self._cache_type)
                grown[: before.shape[0], :, : before.shape[2]] = before
                self._cache[i] = grown
        self._shape = (rows, capacity)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`."""
        rows, sequence = batch.input_ids.shape
        if rows > 1 and sequence > 1 and not self._multi_row_prefill:
            return np.concatenate([self.run(row) for row in _row_by_row(batch)])
        binding = self._binding(batch)
        binding.input_ids[:] = batch.input_ids
        binding.past_lengths[:] = batch.past_lengths
        binding.logit_indices[:] = batch.logit_indices
        with translated("running the model"):
            binding.session.run_with_iobinding(binding.io)
        return binding.logits

    def close(self) -> None:
        """Free the graphs and the cache."""
        self._bound.clear()
        self._cache.clear()
        self._graphs.clear()
        self._shape = (0, 0)

    def _binding(self, batch: Batch) -> "_Binding":
        """Buffers bound for calls of this shape; decode keeps its own, a prefill shape replaces the one before."""
        shape = (batch.phase, *batch.input_ids.shape, batch.logit_indices.shape[1], batch.first_row)
        if shape not in self._bound:
            for other in [key for key in self._bound if batch.phase is Phase.PREFILL and key[0] is Phase.PREFILL]:
                del self._bound[other]
            caches = [cache[batch.first_row : batch.first_row + batch.input_ids.shape[0]] for cache in self._cache]
            self._bound[shape] = _Binding(self._graphs[batch.phase], batch, caches, self._geometry.vocab_size)
        return self._bound[shape]


class _Binding:
    """Arrays for one shape of call, bound to a graph by address; ``caches`` alternate key and value, layer by layer."""

    def __init__(self, session: Any, batch: Batch, caches: list[NDArray[Any]], vocab_size: int) -> None:
        self.session = session
        self.io = session.io_binding()
        self.input_ids = np.empty(batch.input_ids.shape, np.int64)
        self.past_lengths = np.empty(batch.past_lengths.shape, np.int64)
        self.logit_indices = np.empty(batch.logit_indices.shape, np.int64)
        self.logits = np.empty((*batch.logit_indices.shape, vocab_size), np.float32)
        self._caches = caches
        for name in ("input_ids", "past_lengths", "logit_indices"):
            self._bind(self.io.bind_input, name, getattr(self, name))
        self._bind(self.io.bind_output, "logits", self.logits)
        for i, tensor in enumerate(caches):
            layer, part = i // 2, ("key", "value")[i % 2]
            self._bind(self.io.bind_input, f"past_key_values.{layer}.{part}", tensor)
            self._bind(self.io.bind_output, f"present.{layer}.{part}", tensor)

    @staticmethod
    def _bind(bind: Any, name: str, array: NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def open_graphs(runtime: Any, folder: Path, manifest: Manifest, names: list[str], threads: int) -> dict[str, Any]:
    """ONNX Runtime's sessions by graph file: of compiled graphs if they can be had here, of the plain ones otherwise.

    Raises:
        BundleError: ONNX Runtime refuses the plain graphs.
        ResourceError: memory does not suffice.
    """
    place = compiled.find(runtime, folder, manifest, names)
    if place is not None:
        try:
            return _opened(runtime, place.files, threads, optimised=True)
        except BundleError as error:
            log.warning("%s; using the plain graphs, which load slower", error)
            if place.entry is not None:
                cache.remove(place.entry)
    return _opened(runtime, {name: folder / name for name in names}, threads, optimised=False)


def _opened(runtime: Any, paths: dict[str, Path], threads: int, *, optimised: bool) -> dict[str, Any]:
    """Opened side by side: most of the time goes into packing weights, or into checking those that are packed."""

    def opened(path: Path) -> Any:
        options = compiled.session_options(runtime, threads)
        if optimised:
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        with translated(f"{path}: loading"):
            return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    with ThreadPoolExecutor(len(paths)) as pool:
        return dict(zip(paths, pool.map(opened, paths.values()), strict=True))


def _row_by_row(batch: Batch) -> Iterator[Batch]:
    for r in range(len(batch.input_ids)):
        row = slice(r, r + 1)
        yield Batch(
            batch.phase, batch.input_ids[row], batch.past_lengths[row], batch.logit_indices[row], batch.first_row + r
        )


def import_onnxruntime(minimum: str) -> Any:
    """The onnxruntime module.

    Raises:
        MissingExtraError: it is not installed.
        BundleError: it is older than ``minimum``.
    """
    runtime = require("onnxruntime", "cpu")
    if _version(runtime.__version__) < _version(minimum):
        raise BundleError(
            f"onnxruntime {runtime.__version__} is too old, {minimum} or newer is needed: pip install -U onnxruntime "
            "(there is no newer one than 1.23 for Python 3.10)"
        )
    return runtime


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def usable_graphs(manifest: Manifest) -> dict[Phase, str]:
    """The graph file of each phase; a graph whose CPU features are missing here is replaced by the other phase's.

    Raises:
        BundleError: no graph of the bundle computes correctly on this CPU.
    """
    here = cpu_features()
    usable = {name: graph for name, graph in manifest.graphs.items() if here.issuperset(graph.cpu_features)}
    if not usable:
        wanted = sorted({feature for graph in manifest.graphs.values() for feature in graph.cpu_features})
        raise BundleError(f"this CPU lacks {', '.join(wanted)}; build the bundle for it with --int4 or --fp32")
    for name in manifest.graphs.keys() - usable.keys():
        log.warning("this CPU lacks %s: the %s graph is not used", ", ".join(manifest.graphs[name].cpu_features), name)
    fallback = next(iter(usable.values()))
    return {phase: usable.get(phase.value, fallback).file for phase in Phase}


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn exceptions of ONNX Runtime into ours."""
    try:
        yield
    except LlmcError:
        raise
    except MemoryError as error:
        raise ResourceError(f"{doing} ran out of memory; use a smaller --max-context or a smaller model") from error
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime") and "Error in execution" not in str(error):
            raise
        if "bad_alloc" in str(error) or "Failed to allocate memory" in str(error):
            raise ResourceError(f"{doing} ran out of memory; use a smaller --max-context or a smaller model") from error
        reason = " ".join(str(error).split())[:300]
        raise BundleError(f"{doing} failed in ONNX Runtime ({reason}); build the bundle again") from error
