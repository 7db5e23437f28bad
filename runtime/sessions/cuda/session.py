"""The common half of sessions on a GPU: the driver, the cache, and what is said once the GPU's context is lost."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest, MemoryPlan
from llmc.errors import GpuError, LlmcError, ResourceError
from llmc.runtime.host.cuda import Driver
from llmc.runtime.host.machine import available_memory
from llmc.runtime.kv.budget import MB, largest
from llmc.runtime.kv.device_cache import DeviceCache
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sessions.base import Batch, Session
from llmc.runtime.sessions.cuda.blocks import Block, Outputs, Part, outputs_of


class DeviceSession(Session):
    """The half of a session that is the same for every engine on a GPU.

    An engine's session loads its model within :meth:`_free_on_error`, where it calls :meth:`_begin` before it takes
    memory, and :meth:`_make_cache`; it runs calls within :meth:`_guard_context`, and keeps what they give in
    ``_logits``, for that may lie in memory that goes when the session closes.
    ``driver``: the GPU. It is closed with the session.
    """

    cache: DeviceCache

    def __init__(self, folder: Path, manifest: Manifest, driver: Driver) -> None:
        super().__init__(manifest.geometry)
        self._folder = folder
        self._manifest = manifest
        self._geometry = manifest.geometry
        self._limits = manifest.limits
        self._driver = driver
        self.processor = str(driver.device)  # its name, its compute capability and its driver's CUDA version
        self._stream = 0  # none yet
        self._lost: str | None = None
        self._calls = 0
        self._resources = ExitStack()
        self._close_later(driver.close)

    # ------------------------------------------------------------------------------------------------- loading

    @contextmanager
    def _free_on_error(self) -> Iterator[None]:
        """Free everything if loading fails."""
        try:
            with self._guard_context("loading"):
                yield
        except BaseException:
            self.close()
            raise

    def _begin(self, positions: int) -> None:
        assert self._manifest.device is not None
        self._device_memory = check_memory(self._folder, self._driver, self._manifest.device, positions)
        self._driver.activate()
        self._stream = self._driver.stream()
        self._close_later(self._driver.destroy_stream, self._stream)

    def _make_cache(self) -> None:
        self.cache = DeviceCache(
            self._manifest, self._driver, self._stream, device_memory=self._device_memory, guard=self._guard_context
        )
        self.cache.on_move.append(self._forget_addresses)
        self._close_later(self.cache.close)

    def _block(self, size: int) -> Block:
        block = Block(self._driver, size)
        self._close_later(block.close)
        return block

    def _outputs_of(self, rows: int, outputs: int) -> dict[str, Part]:
        return outputs_of(rows, outputs, self._geometry.vocab_size)

    # ------------------------------------------------------------------------------------------------- running

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits float32 [B, O, vocab] of one call; see :class:`llmc.runtime.sessions.base.Session`.

        Raises:
            UsageError: rows or positions that the cache does not have.
            RequestError: TensorRT's profiles do not take it.
            GpuError: the engine or the GPU failed; ``lost`` tells that every later call will.
        """
        self._calls += 1
        return self._run(batch, whole=True)

    def run_ranked(self, batch: Batch) -> NDArray[Any]:
        """As :meth:`run`, with candidates alone: the logits stay on the GPU until one of them asks for its row."""
        self._calls += 1
        return self._run(batch, whole=False)

    @abstractmethod
    def _run(self, batch: Batch, whole: bool) -> NDArray[Any]:
        """One call; its logits, or candidates unless the ``whole`` is wanted."""

    def _rank(self, outputs: Outputs, count: int) -> NDArray[Any]:
        """Candidates [B, ``count``] of the call that has just been run."""
        call = self._calls

        def fetch(row: int, output: int) -> Logits:
            assert call == self._calls, "other logits are in that place by now"
            with self._guard_context("fetching logits"):
                outputs.download_row(row, output, self._stream)
                self._driver.synchronize(self._stream)
            logits: Logits = outputs.logits[row, output]
            return logits

        return outputs.list_ranked(count, fetch)

    def _close_later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function`` when the session closes, the last one first; on a lost GPU nothing can be freed."""

        def close_quietly() -> None:
            with suppress(LlmcError):
                function(*arguments)

        self._resources.callback(close_quietly)

    def close(self) -> None:
        """Free the engine, the cache and the GPU; twice is harmless."""
        self._logits = self._logits[:0]  # they may lie in memory that goes
        self._resources.close()

    # -------------------------------------------------------------------------------------------------- errors

    @contextmanager
    def _guard_context(self, doing: str) -> Iterator[None]:
        """Remember that the GPU's context was lost, and say so at once from then on."""
        if self._lost is not None:
            raise GpuError(self._lost, lost=True)
        try:
            with self._translate_errors(doing):
                yield
        except GpuError as error:
            if not error.lost:
                self._raise_loss(error)
            self._lost = str(error) if error.lost else None
            raise

    def _raise_loss(self, error: GpuError) -> None:
        """Ask the driver whether the context is lost: an engine's words of a failure need not tell."""
        try:
            if self._stream:
                self._driver.synchronize(self._stream)
        except GpuError as loss:
            if loss.lost:
                self._lost = str(loss)
                raise loss from error

    def _translate_errors(self, doing: str) -> AbstractContextManager[None]:
        """Turn the engine's own exceptions into ours; ``doing`` is for the message."""
        return nullcontext()

    # ------------------------------------------------------------------------------------------------ the seam

    @abstractmethod
    def _forget_addresses(self) -> None:
        """Let all go that was made for the addresses and the size of the cache: they are about to change."""


def check_memory(folder: Path, driver: Driver, memory: MemoryPlan, positions: int) -> int:
    """Bytes that a session may take in all; refuses to load what cannot fit with one row of the cache.
    ``positions``: that the cache has at least."""
    free = free_memory(driver) + memory["context"].fixed  # which is taken by now
    needed = memory.total(positions)
    if needed <= free:
        return free
    fits = largest(positions, memory.total, free)
    advice = f"build with --max-context {fits}" if fits else "use a smaller precision or model"
    raise ResourceError(
        f"to run one row of {positions} positions it needs {-(-needed // MB)} MB of GPU memory, "
        f"{free // MB} MB are free on {driver.device.name}",
        f"free some, or {advice}",
        path=folder,
    )


def free_memory(driver: Driver) -> int:
    """Bytes that can be taken; an integrated GPU's driver does not count what the system would give up for it."""
    free, _ = driver.memory_info()
    return max(free, available_memory()) if driver.device.integrated else free
