"""A place: the model that serves under one name, loaded, swapped and unloaded while requests come."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmc.bundle import list_adapters, publication
from llmc.errors import BundleError, EngineClosedError, LlmcError, ResourceError, UsageError, format_value, text_of
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import MemoryNeed
from llmc.runtime.observe.logs import event
from llmc.runtime.server.http.errors import hide_path
from llmc.runtime.server.models.loading import Loader

log = logging.getLogger(__name__)

T = TypeVar("T")
# A bundle that could not be loaded is not tried again before, unless another one is published in its place: hashing
# and testing it would take the processor from running requests.
RETRY_S = 10.0
# Models that are loaded or closed at a time, in a thread each.
THREADS = 8

Phase = Literal["unloaded", "loading", "ready", "failed"]


@dataclass(frozen=True)
class ModelState:
    """A model of the pool at one moment."""

    phase: Phase  # `ready` while one serves, also while another one is loaded beside it
    reason: str | None  # why the last attempt to load or to swap failed; None where it did not
    memory: int  # bytes that it takes now, by its bundle's plan and the present size of its caches
    promised: int  # bytes of the plan of all models that it may grow to; 0 of a single model, which has no such plan
    users: int  # requests that hold it
    draining: int  # bundles that were swapped out and finish their requests
    loads: int  # how often it was loaded


@dataclass(eq=False)
class Loaded:
    """A loaded model."""

    model: Any  # a Generator or an Embedder
    memory: int  # bytes of the plan of all models that it may take; 0 where there is no plan
    draft: int  # bytes of its draft model at its largest
    # names the publication of its folder; None where another one took its place meanwhile
    published: tuple[int, ...] | None
    adapters: tuple[str, ...]  # that came with it
    users: int = 0  # requests that hold it
    used: int = 0  # rises with every use

    @property
    def held(self) -> int:
        """Bytes that it takes now, and a draft model at its largest."""
        return int(self.model.planned_bytes) + self.draft


@dataclass(frozen=True)
class _Failure:
    """The error of a folder's bundle that could not be loaded; every request gets it until the folder changes."""

    error: Exception
    folder: Path
    published: tuple[int, ...] | None
    until: float


class Neighbours(ABC):
    """The places around one: they share memory, names, threads, and the news that a model or a request ended."""

    patience_s: float

    def __init__(self) -> None:
        self.closing = False
        self.clock = itertools.count(1)
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(THREADS, "llmc-pool")
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    def list_adapters(self, place: "Place", folder: Path) -> dict[str, Path]:
        """The adapters of a bundle. Raises BundleError: another model or adapter has the name of one."""

    @abstractmethod
    async def reserve(self, place: "Place", folder: Path, need: MemoryNeed, patience_s: float) -> int | None:
        """Bytes that a model may take, once they are free; None where there is no plan.
        Raises ResourceError: they did not become free within ``patience_s``."""

    @abstractmethod
    async def make_way(self, place: "Place") -> bool:
        """Unload an idle model beside this place's, and wait until it is gone; False if all are in use."""

    def refuse_closed(self) -> None:
        """Raises EngineClosedError: the pool is closing."""
        if self.closing:
            raise EngineClosedError("the service is stopping and takes no requests; try another one, or later")

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that lives as long as it runs; its error is also its own, for all that wait may have gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def notify(self) -> None:
        """Wake those that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self, timeout_s: float | None) -> bool:
        """Wait until a request or a model ended; False if none did in time."""
        if timeout_s is not None and timeout_s <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


class Place:
    """A name, and the model that serves under it.

    Attributes:
        folder: of the bundle that serves, or will be loaded.
        current: the model that serves.
        former: models that finish their requests, or are being closed.
        reserved: bytes of the plan that are promised to a model that is being loaded.
        wanted: requests that are about to take the model, which keeps it from making room for another.
        adapters: further names of requests to it, whether it is loaded or not.
    """

    def __init__(self, name: str, folder: Path, loader: Loader, tool_format: str | None, around: Neighbours) -> None:
        self.name, self.folder = name, folder
        self.current: Loaded | None = None
        self.former: list[Loaded] = []
        self.reserved, self.wanted = 0, 0
        self.adapters: tuple[str, ...] = ()
        self._loader, self._tool_format, self._around = loader, tool_format, around
        self._loading: asyncio.Task[None] | None = None
        self._failure: _Failure | None = None
        self._loads = 0
        self._swapping = asyncio.Lock()

    @property
    def loaded(self) -> list[Loaded]:
        """The models that take memory: those that leave, and the current one."""
        return [*self.former, *([] if self.current is None else [self.current])]

    @property
    def memory(self) -> int:
        """Bytes of the plan that this place holds."""
        return self.reserved + sum(loaded.memory for loaded in self.loaded)

    @property
    def leaving(self) -> int:
        """Bytes of the plan that are free soon: those of models that are being closed."""
        return sum(loaded.memory for loaded in self.former if loaded.users == 0)

    def state(self) -> ModelState:
        if self.current is not None:
            phase: Phase = "ready"
        elif self._loading is not None:
            phase = "loading"
        else:
            phase = "unloaded" if self._failure is None else "failed"
        return ModelState(
            phase,
            None if self._failure is None else hide_path(self._failure.error),
            sum(loaded.held for loaded in self.loaded),
            sum(loaded.memory for loaded in self.loaded),
            sum(loaded.users for loaded in self.loaded),
            len(self.former),
            self._loads,
        )

    # ------------------------------------------------------------------------------------------ requests

    async def take(self) -> Loaded:
        """Count one more user of the model, loaded if it is not."""
        self.wanted += 1
        try:
            self._around.refuse_closed()
            while self.current is None:
                if self._loading is None:
                    self._refuse_failed()
                await asyncio.shield(self._loading or self._load(self.folder, self._around.patience_s))
                self._around.refuse_closed()
            self.current.users += 1
            return self.current
        finally:
            self.wanted -= 1
            self._around.notify()

    def release(self, loaded: Loaded) -> None:
        """Count one user less."""
        loaded.users -= 1
        loaded.used = next(self._around.clock)
        if loaded in self.former and loaded.users == 0:
            self._around.start(self._dispose(loaded))
        self._around.notify()

    def _refuse_failed(self) -> None:
        """Answer with the error of an attempt a moment ago, unless another bundle was published or only memory lacked.
        Raises BundleError."""
        failure = self._failure
        if failure is None or isinstance(failure.error, ResourceError) or time.monotonic() >= failure.until:
            return
        if (failure.folder, failure.published) == (self.folder, publication(self.folder)):
            problem = f"it could not be loaded a moment ago: {hide_path(failure.error)}"
            raise BundleError(problem, path=self.folder) from failure.error

    # ------------------------------------------------------------------------------------------ loading

    def _load(self, folder: Path, patience_s: float) -> asyncio.Task[None]:
        """Begin to load a bundle, in one task that all requests for it wait for."""
        self._loading = self._around.start(self._serve(folder, patience_s))
        return self._loading

    async def _serve(self, folder: Path, patience_s: float) -> None:
        """Load the bundle of a folder, and let it serve."""
        try:
            loaded = await self._open(folder, patience_s)
        finally:
            self._loading = None
        self.retire()
        self.current, self.folder, self._failure, self.adapters = loaded, folder, None, loaded.adapters
        self._loads += 1
        if self._around.closing:
            self.retire()

    async def _open(self, folder: Path, patience_s: float) -> Loaded:
        """Reserve memory for a bundle and load it; remember an error."""
        started, published, reserved = time.monotonic(), publication(folder), 0
        event(log, "loading", model=self.name, bundle=str(folder))
        try:
            adapters = self._around.list_adapters(self, folder)
            need = await self._around.in_thread(self._loader.need, folder)
            share = await self._around.reserve(self, folder, need, patience_s)
            reserved = 0 if share is None else share + need.draft
            self.reserved += reserved
            model = await self._load_model(folder, share, adapters)
        except Exception as error:
            self._failure = _Failure(error, folder, published, time.monotonic() + RETRY_S)
            reason = error if isinstance(error, LlmcError) else text_of(error)
            log.error("%s: %s could not be loaded: %s", self.name, folder, reason)
            raise
        finally:
            self.reserved -= reserved
            self._around.notify()
        known = published if publication(folder) == published else None
        loaded = Loaded(model, reserved, need.draft, known, tuple(adapters), used=next(self._around.clock))
        took = round(time.monotonic() - started, 3)
        event(log, "model loaded", model=self.name, bundle=str(folder), memory=loaded.held, duration_s=took)
        return loaded

    async def _load_model(self, folder: Path, memory: int | None, adapters: dict[str, Path]) -> LoadedBundle:
        """Load a model; where the machine, or its GPU, has less memory than was planned, idle models make room."""
        while True:
            try:
                return await self._around.in_thread(self._loader.load, folder, memory, adapters, self._tool_format)
            except ResourceError:
                if not await self._around.make_way(self):
                    raise

    def retire(self) -> None:
        """Let the current model go once its requests have ended."""
        loaded, self.current = self.current, None
        if loaded is None:
            return
        self.former.append(loaded)
        event(log, "model unloaded", model=self.name, memory=loaded.memory)
        if loaded.users == 0:
            self._around.start(self._dispose(loaded))

    async def _dispose(self, loaded: Loaded) -> None:
        try:
            await self._around.in_thread(loaded.model.close, True)
        finally:
            self.former = [other for other in self.former if other is not loaded]
            self._around.notify()

    # ------------------------------------------------------------------------------------------ hot swap

    async def swap(self, folder: Path | None = None) -> None:
        """Let another bundle serve under the name, without a failed request.

        The new one is loaded beside the old one, whose requests finish while new ones go to the new one. If the new one
        cannot be loaded, the old one goes on. ``folder``: the new bundle; default: the same folder, in which another
        one was published.

        Raises:
            ResourceError: memory does not hold both.
            LlmcError: whatever loading raises.
        """
        target = self.folder if folder is None else Path(folder)
        self.wanted += 1  # it stays meanwhile
        try:
            async with self._swapping:
                while self._loading is not None:
                    with suppress(Exception):  # another request's attempt, which gets the error
                        await asyncio.shield(self._loading)
                self._around.refuse_closed()
                await asyncio.shield(self._load(target, 0.0 if self.current else self._around.patience_s))
        except ResourceError as error:
            if self.current is None:
                raise
            advice = f"{self.name} goes on with the bundle that it has; unload that first to load this one in its place"
            raise ResourceError(error.problem, advice, path=error.path) from error
        finally:
            self.wanted -= 1
            self._around.notify()
        event(log, "model swapped", model=self.name, bundle=str(target))

    async def unload(self) -> None:
        """Let the model go: its requests finish, new ones load it again.
        Raises EngineClosedError: the pool was closed."""
        async with self._swapping:
            self._around.refuse_closed()
            self.retire()

    async def refresh(self) -> bool:
        """Swap the model if another bundle was published in its folder, else take the adapters that the bundle has now.
        A model that is not loaded is read anew when it is.

        Returns:
            False if nothing had changed.
        """
        published = publication(self.folder)
        stays = self.current is None or published == self.current.published
        if published is None or (stays and list_adapters(self.folder).keys() == set(self.adapters)):
            return False
        await (self._refresh_adapters() if stays else self.swap())
        return True

    # ------------------------------------------------------------------------------------------ adapters

    async def load_adapter(self, adapter: str) -> None:
        """Let requests name an adapter that is in the bundle. The model is loaded if it is not.

        Raises:
            UsageError: there is no such adapter, or it is loaded already.
            LlmcError: as :meth:`llmc.runtime.Model.load_adapter`; nothing changes.
        """
        async with self._swapping:
            found = self._around.list_adapters(self, self.folder)
            if adapter not in found:
                problem = f"is {format_value(adapter)}, which the bundle of {self.name} does not have"
                raise UsageError("adapter", problem, "add it with llmc adapter add")
            is_loaded, loaded = self.current is not None, await self.take()
            try:
                if is_loaded:  # else all of them were loaded with it
                    await self._add_adapter(loaded.model, adapter, found[adapter])
            finally:
                self.release(loaded)

    async def _add_adapter(self, model: Any, adapter: str, folder: Path) -> None:
        try:
            await self._around.in_thread(model.load_adapter, adapter, folder)
        except LlmcError as error:
            log.error("%s: the adapter %s could not be loaded: %s", self.name, adapter, error)
            if not isinstance(error, BundleError) or error.path is None:
                raise
            problem = f"the adapter {adapter} could not be loaded: {error.problem}"  # clients are not told the path
            raise BundleError(problem, error.advice, path=error.path) from error
        self.adapters = (*self.adapters, adapter)
        event(log, "adapter loaded", model=self.name, adapter=adapter)

    async def unload_adapter(self, adapter: str) -> None:
        """Take no more requests for an adapter until the model is loaded again; those that have it go on.
        Raises RequestError: none of that name is loaded."""
        async with self._swapping:
            if self.current is not None:
                self.current.model.unload_adapter(adapter)
            self.adapters = tuple(other for other in self.adapters if other != adapter)
        event(log, "adapter unloaded", model=self.name, adapter=adapter)

    async def _refresh_adapters(self) -> None:
        """Take the adapters of a model as its bundle has them now."""
        found = self._around.list_adapters(self, self.folder)
        if self.current is None:
            self.adapters = tuple(found)
        for adapter in self.adapters:
            if adapter not in found:
                await self.unload_adapter(adapter)
        for adapter in found:
            if adapter not in self.adapters:
                await self.load_adapter(adapter)
