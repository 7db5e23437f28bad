"""TensorRT and TensorRT-RTX on a GPU: one engine with a profile for decode and one for prefill, over a cache on the
device.

A decode step writes a few integers into pinned memory, launches one recorded graph, waits, and reads the most probable
tokens in place.
Not run on a GPU yet: tests run this session on doubles of CUDA and TensorRT that enforce their rules.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.runtime.host.cuda import Driver, open_driver
from llmc.runtime.kv.budget import round_up
from llmc.runtime.kv.cache import tensors_of
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.cuda.blocks import INT64, Part, Shape, fill_inputs, inputs_of, size_of
from llmc.runtime.sessions.cuda.session import DeviceSession
from llmc.runtime.sessions.tensorrt.calls import Piece, pieces
from llmc.runtime.sessions.tensorrt.engine import DECODE, PREFILL, Context, Engine, check_machine, require_config
from llmc.runtime.sessions.tensorrt.kernels import compiles_kernels, kernels_file
from llmc.runtime.sessions.tensorrt.library import library_version, load_library
from llmc.runtime.sessions.tensorrt.steps import Call, Step, Steps


class TensorRTSession(DeviceSession):
    """A :class:`llmc.runtime.sessions.base.Session` on an engine of TensorRT's kind.

    Args:
        device: the number of the GPU among those that are visible.
        driver: of the GPU; default: opened, and closed with the session.
        library: tensorrt or tensorrt_rtx; default: what the bundle was built for.

    Raises:
        BundleError: the engine was built for another machine, or the library refuses it.
        MissingExtraError, GpuError: library, driver or GPU are missing, too old or unsupported.
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
        library: Any = None,
    ) -> None:
        self._library = load_library(manifest.target.engine) if library is None else library
        self.engine_version = library_version(self._library)
        super().__init__(folder, manifest, open_driver(device) if driver is None else driver)
        with self._free_on_error():
            self._config = require_config(folder, manifest)
            self._compiled: set[tuple[int, int]] = set()  # rows and bucket of decode steps whose kernels were saved
            self._open(manifest)

    # ------------------------------------------------------------------------------------------------- loading

    def _open(self, manifest: Manifest) -> None:
        check_machine(self._folder, manifest, self._config, self._library, self._driver.device)
        self._begin(round_up(self._config, 1))
        self._engine = self._load_engine(manifest)
        self._make_blocks()
        self._make_contexts(self._engine)
        self._engine.check_aliases([tensor.present for tensor in tensors_of(self._geometry.caches)])
        self._make_cache()
        if self._engine.compiles_kernels:
            self._compile_kernels()

    def _load_engine(self, manifest: Manifest) -> Engine:
        file = self._config.file
        path = self._folder / file
        engine = Engine(self._library, path, self._folder)
        self._close_later(engine.close)
        if compiles_kernels(self._library):
            built = manifest.files[file].sha256 if file in manifest.files else str(path)
            engine.keep_kernels(kernels_file(self.engine_version, self._driver.device.name, built))
        return engine

    def _make_blocks(self) -> None:
        """Room for the inputs and outputs of the largest calls, and the positions of the cache, counted through."""
        config = self._config
        rows, sequence, outputs = config.decode.batch, config.prefill.sequence, config.prefill.outputs
        self._taken = self._block(max(size_of(inputs_of(rows, 1, 1)), size_of(inputs_of(1, sequence, outputs))))
        self._given = self._block(size_of(self._outputs_of(max(rows, outputs), 1)))
        place = Part(0, (config.buckets[-1],), INT64)
        self._slots = self._block(place.end)
        self._slots.array(place)[:] = np.arange(config.buckets[-1])
        self._slots.upload(place.end, self._stream)

    def _make_contexts(self, engine: Engine) -> None:
        """Contexts for each profile; all work in the same memory, for they never run at the same time."""
        size = engine.memory()
        memory = self._driver.alloc(size) if size else 0
        if memory:
            self._close_later(self._driver.free, memory)
        contexts = []
        for profile in (DECODE, PREFILL):
            contexts.append(Context(engine, profile, self._stream, memory, size))
            self._close_later(contexts[-1].close)
        self.changes_kernels = engine.compiles_kernels
        self._steps = Steps(self._driver, self._stream, contexts)
        self._close_later(self._steps.clear)

    def _compile_kernels(self) -> None:
        """Compile the kernels of one row's decode steps, for each bucket, before a request waits for them."""
        self.cache.reserve(1, 1)
        calls = [Call(DECODE, 1, 1, 1, first_row=0, attended=bucket) for bucket in self._config.buckets]
        for step in map(self._step, calls):
            for values in step.inputs.values():
                values[:] = 0
            self._steps.run(step, whole=False)
        self._steps.clear()
        self.cache.close()
        self._save_kernels(calls)

    def _save_kernels(self, calls: Sequence[Call]) -> None:
        """Save kernels at once when decode steps of new shapes were run: a service may be killed, and never closes."""
        if not self._engine.compiles_kernels:
            return
        shapes = {(call.rows, call.attended) for call in calls if call.profile == DECODE}
        if not shapes <= self._compiled:
            self._compiled |= shapes
            self._engine.save_kernels()

    def _bucket(self, positions: int) -> int:
        return next(bucket for bucket in self._config.buckets if bucket >= positions)

    def _forget_addresses(self) -> None:
        self._steps.clear()

    # ------------------------------------------------------------------------------------------------- running

    def _run(self, batch: Batch, whole: bool) -> NDArray[Any]:
        with self._guard_context("running the model"):
            self.cache.begin(batch.first_row, batch.past_lengths.tolist(), batch.input_ids.shape[1])
            todo = list(pieces(batch, self._config))
            if len(todo) == 1 and batch.logit_indices.shape[1]:
                self._logits = self._run_piece(batch, todo[0], whole)
            else:
                self._logits = np.empty((*batch.logit_indices.shape, self._geometry.vocab_size), np.float32)
                for piece in todo:
                    found = self._run_piece(batch, piece, whole=True)
                    if piece.outputs.size:
                        self._logits[piece.rows, piece.outputs] = found
            return self._logits

    def _run_piece(self, batch: Batch, piece: Piece, whole: bool) -> NDArray[Any]:
        part = batch.cut(piece.rows, piece.tokens if piece.profile == PREFILL else None)
        rows, sequence = part.input_ids.shape
        ends = [past + sequence for past in part.past_lengths.tolist()]
        step = self._step(
            Call(
                piece.profile,
                rows=rows,
                sequence=sequence,
                outputs=max(1, piece.outputs.size),  # the engine gives at least one
                first_row=part.first_row,
                attended=self._bucket(max(ends)),
            )
        )
        fill_inputs(step.inputs, part)
        self._steps.run(step, whole)
        self._save_kernels([step.call])
        self.cache.note_computed(part.first_row, ends)
        return step.outputs.logits if whole else self._rank(step.outputs, piece.outputs.size)

    def _step(self, call: Call) -> Step:
        step = self._steps.find(call)
        if step is None:
            inputs = inputs_of(call.rows, call.sequence, call.outputs)
            outputs = self._outputs_of(call.rows, call.outputs)
            step = Step(call, (self._taken, self._given), (inputs, outputs), self._collect_fixed(call))
            self._steps.keep(step)
        return step

    def _collect_fixed(self, call: Call) -> tuple[dict[str, Shape], dict[str, int]]:
        """Shapes and addresses of what no call brings along: the cache, and its positions."""
        shapes: dict[str, Shape] = {"cache_slots": (call.attended,)}
        addresses = {"cache_slots": self._slots.device}
        for i, tensor in enumerate(self.cache.tensors):
            shapes[tensor.past] = tensor.of(call.rows, self.cache.capacity)
            addresses[tensor.past] = addresses[tensor.present] = self.cache.address(i, call.first_row)
        return shapes, addresses
