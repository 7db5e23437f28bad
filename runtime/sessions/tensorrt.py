"""TensorRT and TensorRT-RTX on a GPU: one engine with a profile for decode and one for prefill, over a cache on the
device.

A decode step writes a few integers into pinned memory, launches one recorded graph, waits, and reads logits in place.
Not run on a GPU yet: tests run this session on doubles of CUDA and TensorRT that enforce their rules.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import GpuError, LlmcError, RequestError, UsageError
from llmc.runtime.cuda import Driver, open_driver
from llmc.runtime.engine_library import library_version, load_library
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.device_blocks import INT64, Block, Part, inputs_of, outputs_of, size_of
from llmc.runtime.sessions.device_cache import DeviceCache
from llmc.runtime.sessions.device_memory import check_memory
from llmc.runtime.sessions.tensorrt_calls import Piece, Sparse, pieces
from llmc.runtime.sessions.tensorrt_engine import (
    DECODE,
    PREFILL,
    Context,
    Engine,
    cache_names,
    check_machine,
    decoder_interface,
    required_plan,
    select_interface,
)
from llmc.runtime.sessions.tensorrt_kernels import compiles_kernels, kernels_file
from llmc.runtime.sessions.tensorrt_steps import Call, Step, Steps


class TensorRTSession:
    """A :class:`llmc.runtime.sessions.base.Session` on an engine of TensorRT's kind.

    Args:
        folder: the bundle.
        manifest: of the bundle.
        threads: of no use here.
        driver: the GPU; default: the first one that is visible. It is closed with the session.
        library: tensorrt or tensorrt_rtx; default: what the bundle was built for.

    Raises:
        BundleError: the engine was built for another machine, or the library refuses it.
        MissingExtraError, GpuError: library, driver or GPU are missing, too old or unsupported.
        ResourceError: the GPU's memory does not suffice.
    """

    substitutes = False  # both phases are profiles of one engine

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int, *, driver: Driver | None = None, library: Any = None
    ) -> None:
        self._folder = folder
        self._geometry = manifest.geometry
        self._limits = manifest.limits
        self._lost: str | None = None
        self._resources = ExitStack()
        self._library = load_library(manifest.target.engine) if library is None else library
        self._driver = open_driver() if driver is None else driver
        self._later(self._driver.close)
        try:
            self._plan = required_plan(folder, manifest)
            with self._guarded():
                self._open(manifest)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------- loading

    def _open(self, manifest: Manifest) -> None:
        driver, g = self._driver, self._geometry
        check_machine(self._folder, manifest, self._plan, self.engine_version, driver.device)
        self._device_memory = check_memory(self._folder, driver, manifest.device, self._rounded(1))
        driver.activate()
        self._stream = driver.stream()
        self._later(driver.destroy_stream, self._stream)
        engine, select = self._load(manifest)
        self._candidates = self._plan.candidates if select is not None else 0
        self._make_blocks()
        self._make_contexts(engine, select)
        self._make_cache(engine, manifest.cache)
        self._sparse = Sparse(g.vocab_size)
        self._logits: NDArray[np.float32] = np.empty((0, 0, g.vocab_size), np.float32)
        self._hidden: NDArray[np.float32] = np.empty((0, 0, g.hidden_size), np.float32)
        self._left: Step | None = None  # whose logits are still on the device

    def _load(self, manifest: Manifest) -> tuple[Engine, Engine | None]:
        """The engine, and the one that selects the largest logits.

        An integrated GPU needs no second one: all logits are in the host's memory as they are.
        """
        plan, folder = self._plan, self._folder
        engine = self._loaded(manifest, plan.file)
        if plan.stripped:
            graph = folder / manifest.graphs["decode"].file
            importlib.import_module("llmc.runtime.refit").refit(self._library, engine.native, graph)
        engine.check(decoder_interface(self._geometry, manifest.cache, plan.capacity), profiles=2)
        if not plan.select or not plan.candidates or self._driver.device.integrated:
            return engine, None
        select = self._loaded(manifest, plan.select)
        select.check(select_interface(self._geometry.vocab_size, plan.candidates), profiles=1)
        return engine, select

    def _loaded(self, manifest: Manifest, file: str) -> Engine:
        path, compatible = self._folder / file, self._plan.version_compatible
        engine = Engine(self._library, path, self._folder, version_compatible=compatible)
        self._later(engine.close)
        if compiles_kernels(self._library):
            built = manifest.files[file].sha256 if file in manifest.files else str(path)
            engine.keep_kernels(kernels_file(self.engine_version, self._driver.device.name, built))
        return engine

    def _make_blocks(self) -> None:
        """Room for the inputs and outputs of the largest calls, and the positions of the cache, counted through."""
        plan, g = self._plan, self._geometry
        rows, sequence, outputs = plan.decode.batch, plan.prefill.sequence, plan.prefill.outputs
        self._taken = self._block(max(size_of(inputs_of(rows, 1, 1)), size_of(inputs_of(1, sequence, outputs))))
        most = max(rows, outputs)
        self._given = self._block(size_of(outputs_of(most, 1, g.hidden_size, g.vocab_size, self._candidates)))
        place = Part(0, (plan.buckets[-1],), INT64)
        self._slots = self._block(place.end)
        self._slots.array(place)[:] = np.arange(plan.buckets[-1])
        self._slots.upload(place.end, self._stream)

    def _block(self, size: int) -> Block:
        block = Block(self._driver, size)
        self._later(block.close)
        return block

    def _make_contexts(self, engine: Engine, select: Engine | None) -> None:
        """A context for each profile; they work in the same memory, for they never run at the same time."""
        size = max(each.memory() for each in (engine, select) if each is not None)
        memory = self._driver.alloc(size) if size else 0
        if memory:
            self._later(self._driver.free, memory)

        def context(engine: Engine, profile: int) -> Context:
            made = Context(engine, profile, self._stream, memory, size)
            self._later(made.close)
            return made

        contexts = [context(engine, profile) for profile in (DECODE, PREFILL)]
        selecting = context(select, 0) if select is not None else None
        self._most_selected = select.largest("logits", 0)[0] if select is not None else 0
        self._steps = Steps(self._driver, self._stream, contexts, selecting)
        self._later(self._steps.clear)

    def _make_cache(self, engine: Engine, kind: str) -> None:
        buffers = 1 if engine.aliased(self._folder, cache_names("present", self._geometry.layers)) else 2
        dtype = np.dtype(np.uint16 if kind == "bfloat16" else kind)
        self._cache = DeviceCache(self._driver, self._geometry, dtype.itemsize, self._stream, buffers, dtype)
        self._later(self._cache.close)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function`` when the session closes, the last one first; on a lost GPU nothing can be freed."""

        def quietly() -> None:
            with suppress(LlmcError):
                function(*arguments)

        self._resources.callback(quietly)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember that the GPU's context was lost, and say so at once from then on."""
        if self._lost is not None:
            raise GpuError(self._lost, lost=True)
        try:
            yield
        except GpuError as error:
            self._lost = str(error) if error.lost else None
            raise

    def close(self) -> None:
        """Free the engine, the cache and the GPU; twice is harmless."""
        self._resources.close()

    # ------------------------------------------------------------------------------------------------- the cache

    @property
    def engine_version(self) -> str:
        """Version of the engine's library."""
        return library_version(self._library)

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
        """Positions that the cache holds now, per row: the engine's own number, or one of its buckets."""
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
        """Grow the cache to at least ``rows`` x ``capacity``, rounded up to what the engine takes.

        Raises:
            RequestError: more than the bundle was built for.
            ResourceError: memory does not suffice; the cache keeps its size.
            GpuError: the GPU failed.
        """
        self._check_limits(rows, capacity)
        self._resize(max(rows, self.rows), max(self._rounded(capacity), self.capacity), None)

    def resize(self, rows: int, capacity: int, used: Sequence[int] | None = None) -> None:
        """Make the cache ``rows`` x ``capacity``, rounded up to what the engine takes; see
        :class:`llmc.runtime.sessions.base.Session`.

        Raises:
            RequestError: more than the bundle was built for.
            UsageError: ``used`` does not have one number for each row of the cache.
            ResourceError: memory does not suffice; the cache keeps its size.
            GpuError: the GPU failed.
        """
        self._check_limits(rows, capacity)
        self._resize(rows, self._rounded(capacity), used)

    def _resize(self, rows: int, capacity: int, used: Sequence[int] | None) -> None:
        with self._guarded():
            self._steps.clear()  # their addresses go
            self._cache.resize(rows, capacity, used)

    def _rounded(self, capacity: int) -> int:
        return self._plan.capacity or self._bucket(capacity)

    def _bucket(self, positions: int) -> int:
        """The smallest number of positions that the engine may look at and that is enough."""
        return next(bucket for bucket in self._plan.buckets if bucket >= positions)

    def _check_limits(self, rows: int, capacity: int) -> None:
        if rows > self._limits.max_batch or capacity > self._limits.max_context:
            raise RequestError(
                f"a cache of {rows} rows x {capacity} positions is asked for, the bundle was built for "
                f"{self._limits.max_batch} x {self._limits.max_context}; build with larger ones"
            )

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions ``start`` ... ``end - 1`` of the row ``source`` to the same ones of ``target``.

        Raises:
            UsageError: a row or position that the cache does not have.
            GpuError: the GPU failed.
        """
        with self._guarded():
            self._cache.copy(source, target, start, end)

    def read(self, row: int, start: int, end: int) -> NDArray[Any]:
        """A copy of keys and values [2 * layers, kv_heads, end - start, head_dim]; bfloat16 comes as uint16.

        Raises:
            UsageError: a row or position that the cache does not have.
            GpuError: the GPU failed.
        """
        with self._guarded():
            return self._cache.read(row, start, end)

    def write(self, row: int, start: int, values: NDArray[Any]) -> None:
        """Put ``values``, as :meth:`read` returns them, into the positions from ``start`` on.

        Raises:
            UsageError: a row or position that the cache does not have, or values of another shape or type.
            GpuError: the GPU failed.
        """
        with self._guarded():
            self._cache.write(row, start, values)

    # ------------------------------------------------------------------------------------------------- running

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`.

        With ``candidates`` the array cannot be written to, and holds -inf where no candidate is.

        Raises:
            UsageError: rows, positions or places of logits that the cache or the call does not have.
            RequestError: the engine's profiles do not take it.
            GpuError: the engine or the GPU failed; ``lost`` tells that every later call will.
        """
        with self._guarded():
            self._check_call(batch)
            todo = list(pieces(batch, self._plan))
            if len(todo) == 1 and batch.logit_indices.shape[1]:
                return self._run_at_once(batch, todo[0])
            return self._run_in_pieces(batch, todo)

    def full_logits(self) -> NDArray[np.float32]:
        """All logits of the last call, float32 [B, O, vocab], also of one that asked for candidates.

        Raises:
            GpuError: the GPU failed.
        """
        with self._guarded():
            if self._left is not None:
                self._left.download_logits(self._stream)
                self._driver.synchronize(self._stream)
                self._logits, self._left = self._left.outputs["logits"], None
            return self._logits

    def _check_call(self, batch: Batch) -> None:
        rows, sequence = batch.input_ids.shape
        last = max(batch.past_lengths.tolist()) + sequence
        if batch.first_row + rows > self.rows or last > self.capacity:
            raise UsageError(
                f"rows {batch.first_row} ... {batch.first_row + rows - 1} up to position {last} are asked for, the "
                f"cache has {self.rows} rows of {self.capacity}; reserve room first"
            )
        indices = batch.logit_indices
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < sequence:
            raise UsageError(
                f"logits are asked for at {indices.tolist()}, the call has the tokens 0 ... {sequence - 1}"
            )

    def _run_at_once(self, batch: Batch, piece: Piece) -> NDArray[np.float32]:
        few = 0 < batch.candidates <= self._candidates and batch.logit_indices.size <= self._most_selected
        step = self._run_piece(batch, piece, self._candidates if few else 0)
        self._hidden = step.outputs["hidden_states"]
        self._left = step if few else None
        if not few:
            self._logits = step.outputs["logits"]
            return self._logits
        found = self._sparse.fill(step.outputs["values"], step.outputs["indices"])
        return found.reshape(*batch.logit_indices.shape, found.shape[1])

    def _run_in_pieces(self, batch: Batch, todo: Sequence[Piece]) -> NDArray[np.float32]:
        """Call by call, and what each gives is put together."""
        g, shape = self._geometry, batch.logit_indices.shape
        logits = np.empty((*shape, g.vocab_size), np.float32)
        hidden = np.empty((*shape, g.hidden_size), np.float32)
        for piece in todo:
            step = self._run_piece(batch, piece, 0)
            if piece.outputs.size:
                logits[piece.rows, piece.outputs] = step.outputs["logits"]
                hidden[piece.rows, piece.outputs] = step.outputs["hidden_states"]
        self._logits, self._hidden, self._left = logits, hidden, None
        return logits

    def _run_piece(self, batch: Batch, piece: Piece, candidates: int) -> Step:
        ids = batch.input_ids[piece.rows, piece.tokens]
        past = [length + piece.tokens.start for length in batch.past_lengths[piece.rows].tolist()]
        ends = [length + ids.shape[1] for length in past]
        first_row = batch.first_row + piece.rows.start
        step = self._step(
            Call(
                piece.profile,
                rows=len(ids),
                sequence=ids.shape[1],
                outputs=max(1, piece.outputs.size),  # the engine gives at least one
                first_row=first_row,
                attended=self._bucket(max(ends)) if self._plan.capacity else self.capacity,
                side=self._cache.side(first_row, len(ids)),
                candidates=candidates,
            )
        )
        step.inputs["input_ids"][:] = ids
        step.inputs["past_lengths"][:] = past
        step.inputs["logit_indices"][:] = 0
        if piece.profile == PREFILL and piece.outputs.size:
            step.inputs["logit_indices"][:] = batch.logit_indices[piece.rows, piece.outputs] - piece.tokens.start
        self._steps.run(step)
        self._cache.computed(first_row, ends)
        return step

    def _step(self, call: Call) -> Step:
        step = self._steps.find(call)
        if step is None:
            g = self._geometry
            inputs = inputs_of(call.rows, call.sequence, call.outputs)
            outputs = outputs_of(call.rows, call.outputs, g.hidden_size, g.vocab_size, call.candidates)
            step = Step(call, (self._taken, self._given), (inputs, outputs), self._fixed(call))
            self._steps.keep(step)
        return step

    def _fixed(self, call: Call) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Shapes and addresses of what no call brings along: the cache, and its positions."""
        g = self._geometry
        shape = (call.rows, g.kv_heads, self.capacity, g.head_dim)
        pasts, presents = (cache_names(which, g.layers) for which in ("past_key_values", "present"))
        shapes = {"cache_slots": (call.attended,), **dict.fromkeys(pasts, shape)}
        addresses = {"cache_slots": self._slots.device}
        for tensor, (past, present) in enumerate(zip(pasts, presents, strict=True)):
            addresses[past] = self._cache.address(tensor, call.first_row)
            addresses[present] = self._cache.other_address(tensor, call.first_row)
        return shapes, addresses
