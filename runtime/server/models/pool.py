"""The models of a service by name: loaded when asked for, within one plan of memory, and swapped while they serve."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmc.bundle import Manifest, list_adapters, publication
from llmc.errors import (
    BundleError,
    EngineClosedError,
    GpuError,
    LlmcError,
    ResourceError,
    UsageError,
    format_value,
    text_of,
)
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import MemoryNeed, default_memory
from llmc.runtime.observe.logs import event
from llmc.runtime.server.http.accounts import allows_model
from llmc.runtime.server.http.errors import hide_path
from llmc.runtime.server.http.logs import note
from llmc.runtime.server.models.loading import Loader
from llmc.runtime.text.chat_template import has_template

log = logging.getLogger(__name__)

T = TypeVar("T")
MB = 1_000_000
# A request waits so long for memory that other models' requests hold; about as long as a short answer takes.
PATIENCE_S = 10.0
# A bundle that could not be loaded is not tried again before, unless another one is published in its place: hashing
# and testing it would take the processor from those who are served.
RETRY_S = 10.0
# Models that are loaded or closed at a time, in a thread each.
THREADS = 8

Phase = Literal["unloaded", "loading", "ready", "failed"]


@dataclass(frozen=True)
class ModelState:
    """A model of the pool at one moment.

    Attributes:
        phase: ``ready`` while one serves, also while another one is loaded beside it.
        reason: why the last attempt to load or to swap failed; None where it did not.
        memory: bytes that it takes now, by its bundle's plan and the present size of its caches.
        promised: bytes of the plan of all models that it may grow to; 0 of a single model, which has no such plan.
        users: requests that hold it.
        draining: bundles that were swapped out and finish their requests.
        loads: how often it was loaded.
    """

    phase: Phase
    reason: str | None
    memory: int
    promised: int
    users: int
    draining: int
    loads: int


@dataclass(eq=False)
class _Loaded:
    """A loaded model; ``memory`` is its share of the plan, ``adapters`` are those that came with it, ``users`` its
    requests, ``used`` rises with every use."""

    model: Any  # a Generator or an Embedder
    memory: int
    draft: int
    published: tuple[int, ...] | None
    adapters: tuple[str, ...]
    users: int = 0
    used: int = 0

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


@dataclass(eq=False)
class _Place:
    """A name, and what serves under it.

    ``former`` finish their requests or are being closed; ``reserved`` bytes are promised to what is being loaded;
    ``wanted`` counts those who are about to take the model, which keeps it from making room for another; ``adapters``
    are further names of requests to it, whether it is loaded or not.
    """

    name: str
    folder: Path
    current: _Loaded | None = None
    former: list[_Loaded] = field(default_factory=list)
    loading: asyncio.Task[None] | None = None
    reserved: int = 0
    failure: _Failure | None = None
    wanted: int = 0
    loads: int = 0
    adapters: tuple[str, ...] = ()
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def all(self) -> list[_Loaded]:
        """The loaded models of this place: those being replaced and the current one."""
        return [*self.former, *([] if self.current is None else [self.current])]

    @property
    def is_idle(self) -> bool:
        """True if its model may go."""
        return self.current is not None and self.current.users == 0 and self.wanted == 0


class ModelPool:
    """Models by name, in one plan of memory. Its methods belong to one event loop; loading happens in threads.

    A model is loaded when first asked for, by one thread, however many ask. Each is promised a share of the memory: at
    least what one row of its longest context takes, at most what all rows and its prefix cache do, and in between as
    the memory divides among all. Where the models do not fit together, the one that nobody uses and that was used
    longest ago makes room; one in use never does. Without ``memory``, a single model is held against what is
    available, as :func:`llmc.runtime.load` does, and several share what was available when the pool was made.

    Args:
        bundles: folders by name; the first one is loaded by :meth:`warm` unless told otherwise.
        memory: bytes that this process may take.
        load_options: further arguments of :func:`llmc.runtime.load`, for all models; those that concern an engine are
            left out for bundles that embed or rank.
        tool_formats: the format of calls of each model that has one, by name.
        patience_s: seconds that a request waits for memory that others' requests hold.

    Raises:
        BundleError: a folder is no bundle, or has an adapter with the name of another model or adapter.
        ResourceError: a model does not fit, even alone.
        UsageError: there is no bundle, or one was not built for what the options ask.
    """

    def __init__(
        self,
        bundles: Mapping[str, Path],
        *,
        memory: int | None,
        load_options: Mapping[str, Any],
        tool_formats: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if not bundles:
            raise UsageError("models", "names no bundle, expected at least one")
        self.lost: GpuError | None = None
        self._places = {name: _Place(name, Path(folder)) for name, folder in bundles.items()}
        self._loader = Loader(load_options)
        self._tool_formats = tool_formats or {}
        self._patience_s = patience_s
        if memory is None and len(bundles) > 1:
            memory = default_memory()
        self.memory = memory
        needs = {place.folder: self._loader.need(place.folder) for place in self._places.values()}
        self._needed = sum(needs[place.folder].least for place in self._places.values())
        for folder, need in needs.items():
            self._loader.check_options(folder)
            self._refuse_too_large(folder, need)
        for place in self._places.values():
            place.adapters = tuple(self._list_adapters(place, place.folder))
        self._changed = asyncio.Event()
        self._clock = itertools.count(1)
        self._threads = ThreadPoolExecutor(THREADS, "llmc-pool")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    # ------------------------------------------------------------------------------------------ what is there

    @property
    def names(self) -> tuple[str, ...]:
        """All names, loaded or not, in the order given."""
        return tuple(self._places)

    @property
    def adapters(self) -> dict[str, str]:
        """The names of adapters, each with that of its model, loaded or not."""
        return {adapter: place.name for place in self._places.values() for adapter in place.adapters}

    def base(self, name: str) -> str:
        """The name of an adapter's model; a model's own name stays as it is."""
        return self.adapters.get(name, name)

    @property
    def memory_taken(self) -> int:
        """Bytes of the plan that models hold; 0 where a single model has no plan."""
        return sum(loaded.memory for loaded in self._all()) + sum(place.reserved for place in self._places.values())

    def manifest(self, name: str) -> Manifest:
        """The manifest of the model that serves under a name, or would be loaded. Loads nothing.
        Raises UsageError: there is no such name; BundleError: the bundle is not there any more."""
        place = self._place(self.base(name))
        return self._loader.read(place.folder) if place.current is None else place.current.model.manifest

    def has_template(self, name: str) -> bool:
        """True if the model that serves under a name, or would be loaded, has a chat template."""
        return has_template(self._place(self.base(name)).folder)

    def models(self) -> dict[str, LoadedBundle]:
        """Loaded models by name, to look at their metrics; to use one, lease it."""
        return {name: place.current.model for name, place in self._places.items() if place.current is not None}

    def states(self) -> dict[str, ModelState]:
        return {name: _state(place) for name, place in self._places.items()}

    # ------------------------------------------------------------------------------------------ requests

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Any]:
        """The model of a name, or of an adapter's, loaded if it is not; it stays for as long as the block lasts."""
        note(model=name)
        place = self._place(self.base(name))
        loaded = await self._take(place)
        try:
            yield loaded.model
        except GpuError as error:
            if error.lost:
                self.lost = error
            raise
        finally:
            self._release(place, loaded)

    async def warm(self, *names: str) -> None:
        """Load models before anybody asks for them; the first one if none is named.
        Raises ResourceError: they do not fit together; LlmcError: as :meth:`lease` does."""
        async with AsyncExitStack() as held:  # all at once, so that none makes room for another
            for name in names or self.names[:1]:
                await held.enter_async_context(self.lease(name))

    async def _take(self, place: _Place) -> _Loaded:
        """Count one more user of a name's model, loaded if it is not."""
        place.wanted += 1
        try:
            self._refuse_closed()
            while place.current is None:
                if place.loading is None:
                    _refuse_failed(place)
                await asyncio.shield(place.loading or self._load(place, place.folder, self._patience_s))
                self._refuse_closed()
            place.current.users += 1
            return place.current
        finally:
            place.wanted -= 1
            self._notify()

    def _release(self, place: _Place, loaded: _Loaded) -> None:
        loaded.users -= 1
        loaded.used = next(self._clock)
        if loaded in place.former and loaded.users == 0:
            self._start_task(self._dispose(place, loaded))
        self._notify()

    # ------------------------------------------------------------------------------------------ loading

    def _load(self, place: _Place, folder: Path, patience_s: float) -> asyncio.Task[None]:
        """Begin to load a bundle; the one task that all requests for it wait for."""
        place.loading = self._start_task(self._serve(place, folder, patience_s))
        return place.loading

    async def _serve(self, place: _Place, folder: Path, patience_s: float) -> None:
        """Load the bundle of a folder, and let it serve under a name."""
        try:
            loaded = await self._open(place, folder, patience_s)
        finally:
            place.loading = None
        self._retire(place)
        place.current, place.folder, place.failure, place.adapters = loaded, folder, None, loaded.adapters
        place.loads += 1
        if self._closing:
            self._retire(place)

    async def _open(self, place: _Place, folder: Path, patience_s: float) -> _Loaded:
        """Reserve memory for a bundle and load it; an error is noted at its place."""
        started, published, reserved = time.monotonic(), publication(folder), 0
        event(log, "loading", model=place.name, bundle=str(folder))
        try:
            adapters = self._list_adapters(place, folder)
            need = await self._in_thread(self._loader.need, folder)
            share = await self._share(place, folder, need, patience_s)
            reserved = 0 if share is None else share + need.draft
            place.reserved += reserved
            model = await self._load_model(place, folder, share, adapters)
        except Exception as error:
            place.failure = _Failure(error, folder, published, time.monotonic() + RETRY_S)
            log.error(
                "%s: %s could not be loaded: %s",
                place.name,
                folder,
                error if isinstance(error, LlmcError) else text_of(error),
            )
            raise
        finally:
            place.reserved -= reserved
            self._notify()
        known = published if publication(folder) == published else None
        loaded = _Loaded(model, reserved, need.draft, known, tuple(adapters), used=next(self._clock))
        took = round(time.monotonic() - started, 3)
        event(log, "model loaded", model=place.name, bundle=str(folder), memory=loaded.held, duration_s=took)
        return loaded

    async def _load_model(
        self, place: _Place, folder: Path, memory: int | None, adapters: Mapping[str, Path]
    ) -> LoadedBundle:
        """Load a model; where the machine, or its GPU, has less memory than was planned, idle models make room."""
        while True:
            try:
                form = self._tool_formats.get(place.name)
                return await self._in_thread(self._loader.load, folder, memory, adapters, form)
            except ResourceError:
                if not self._evict(place):
                    raise
                while self._leaving:
                    await self._change(None)

    # ------------------------------------------------------------------------------------------ memory

    def _refuse_too_large(self, folder: Path, need: MemoryNeed) -> None:
        if self.memory is not None and need.least + need.draft > self.memory:
            raise ResourceError(
                f"{-(-(need.least + need.draft) // MB)} MB are needed, "
                f"{self.memory // MB} MB may be taken by all models",
                "give more memory, or lower max_context or the prefix cache",
                path=folder,
            )

    async def _share(self, place: _Place, folder: Path, need: MemoryNeed, patience_s: float) -> int | None:
        """Bytes that a model may take, once they are free; None where there is no plan."""
        if self.memory is None:
            return None
        self._refuse_too_large(folder, need)
        await self._make_room(place, need.least + need.draft, self.memory, patience_s)
        fair = self.memory * need.least // max(1, self._needed)
        return max(need.least, min(need.most, fair, self.memory - self.memory_taken - need.draft))

    async def _make_room(self, place: _Place, least: int, memory: int, patience_s: float) -> None:
        """Unload idle models until the least fits, and wait for those in use."""
        until = time.monotonic() + patience_s
        while (missing := least + self.memory_taken - memory) > 0:
            self._refuse_closed()
            leaving = sum(loaded.memory for loaded in self._leaving)
            if missing > leaving and self._evict(place):
                continue
            if not await self._change(None if missing <= leaving else until - time.monotonic()):
                raise ResourceError(
                    f"{-(-missing // MB)} MB are missing of the {memory // MB} MB that all models may take, "
                    "for others are in use",
                    "try again later, or give more memory",
                    path=place.folder,
                )

    def _evict(self, besides: _Place) -> bool:
        """Unload the idle model that was used longest ago; False if all are in use."""
        idle = [place for place in self._places.values() if place.is_idle and place is not besides]
        if idle:
            self._retire(min(idle, key=lambda place: place.current.used if place.current else 0))
        return bool(idle)

    def _retire(self, place: _Place) -> None:
        loaded, place.current = place.current, None
        if loaded is None:
            return
        place.former.append(loaded)
        event(log, "model unloaded", model=place.name, memory=loaded.memory)
        if loaded.users == 0:
            self._start_task(self._dispose(place, loaded))

    async def _dispose(self, place: _Place, loaded: _Loaded) -> None:
        try:
            await self._in_thread(loaded.model.close, True)
        finally:
            place.former = [other for other in place.former if other is not loaded]
            self._notify()

    @property
    def _leaving(self) -> list[_Loaded]:
        return [loaded for place in self._places.values() for loaded in place.former if loaded.users == 0]

    # ------------------------------------------------------------------------------------------ hot swap

    async def swap(self, name: str, folder: Path | None = None) -> None:
        """Let another bundle serve under a name, without a failed request.

        The new one is loaded beside the old one, whose requests finish while new ones go to the new one. If the new one
        cannot be loaded, the old one goes on. ``folder``: the new bundle; default: the same folder, in which another
        one was published.

        Raises:
            UsageError: there is no such name.
            ResourceError: memory does not hold both.
            LlmcError: whatever loading raises.
        """
        place = self._place(name)
        target = place.folder if folder is None else Path(folder)
        place.wanted += 1  # it stays meanwhile
        try:
            async with place.swapping:
                while place.loading is not None:
                    with suppress(Exception):  # somebody else's attempt, with somebody else to be told
                        await asyncio.shield(place.loading)
                self._refuse_closed()
                await asyncio.shield(self._load(place, target, 0.0 if place.current else self._patience_s))
        except ResourceError as error:
            if place.current is None:
                raise
            raise ResourceError(
                error.problem,
                f"{name} goes on with the bundle that it has; unload that first to load this one in its place",
                path=error.path,
            ) from error
        finally:
            place.wanted -= 1
            self._notify()
        event(log, "model swapped", model=name, bundle=str(target))

    async def refresh(self) -> dict[str, Exception | None]:
        """Swap every loaded model in whose folder another bundle was published, and take the others' adapters as their
        bundles have them; the error, or None, of each that was tried. What is not loaded is read anew when it is."""
        results: dict[str, Exception | None] = {}
        for name, place in self._places.items():
            published = publication(place.folder)
            stays = place.current is None or published == place.current.published
            if published is None or (stays and list_adapters(place.folder).keys() == set(place.adapters)):
                continue
            try:
                await (self._refresh_adapters(place) if stays else self.swap(name))
                results[name] = None
            except Exception as error:  # noqa: BLE001 - logged; the old one serves, and the others have their turn
                results[name] = error
        return results

    async def unload(self, name: str) -> None:
        """Let a model go: its requests finish, new ones load it again.
        Raises UsageError: there is no such name; EngineClosedError: the pool was closed."""
        place = self._place(name)
        async with place.swapping:
            self._refuse_closed()
            self._retire(place)

    # ------------------------------------------------------------------------------------------ adapters

    async def load_adapter(self, name: str, adapter: str) -> None:
        """Let requests name an adapter that is in a model's bundle. The model is loaded if it is not.

        Raises:
            UsageError: there is no such model, or no such adapter, or it is loaded already.
            LlmcError: as :meth:`llmc.runtime.Model.load_adapter`; nothing changes.
        """
        place = self._place(name)
        async with place.swapping:
            found = self._list_adapters(place, place.folder)
            if adapter not in found:
                known = ", ".join(filter(allows_model, found)) or "none"
                raise UsageError(
                    "adapter",
                    f"is {format_value(adapter)}, and the bundle of {name} has {known}",
                    "add it with llmc adapter add",
                )
            if place.current is None:
                await self.warm(name)  # which loads all of them
                return
            async with self.lease(name) as model:
                await self._add_adapter(place, model, adapter, found[adapter])

    async def _add_adapter(self, place: _Place, model: Any, adapter: str, folder: Path) -> None:
        try:
            await self._in_thread(model.load_adapter, adapter, folder)
        except LlmcError as error:
            log.error("%s: the adapter %s could not be loaded: %s", place.name, adapter, error)
            if not isinstance(error, BundleError) or error.path is None:
                raise
            said = f"the adapter {adapter} could not be loaded: {error.problem}"  # clients are not told the path
            raise BundleError(said, error.advice, path=error.path) from error
        place.adapters = (*place.adapters, adapter)
        event(log, "adapter loaded", model=place.name, adapter=adapter)

    async def unload_adapter(self, name: str, adapter: str) -> None:
        """Take no more requests for an adapter until its model is loaded again; those that have it go on.
        Raises UsageError: there is no such model; RequestError: none of that name is loaded."""
        place = self._place(name)
        async with place.swapping:
            if place.current is not None:
                place.current.model.unload_adapter(adapter)
            place.adapters = tuple(other for other in place.adapters if other != adapter)
        event(log, "adapter unloaded", model=name, adapter=adapter)

    async def _refresh_adapters(self, place: _Place) -> None:
        """Take the adapters of a model as its bundle has them now."""
        found = self._list_adapters(place, place.folder)
        if place.current is None:
            place.adapters = tuple(found)
        for adapter in place.adapters:
            if adapter not in found:
                await self.unload_adapter(place.name, adapter)
        for adapter in found:
            if adapter not in place.adapters:
                await self.load_adapter(place.name, adapter)

    def _list_adapters(self, place: _Place, folder: Path) -> dict[str, Path]:
        """The adapters of a bundle that a place serves or is to serve; BundleError where another has such a name."""
        found = list_adapters(folder)
        others = self._places.keys() | {name for name, base in self.adapters.items() if base != place.name}
        if taken := sorted(others & found.keys()):
            raise BundleError(
                f"{place.name} has an adapter {taken[0]!r}, the name of another model or of another one's adapter",
                "add it under a name of its own",
                path=folder,
            )
        return found

    # ------------------------------------------------------------------------------------------ the end

    async def close(self, drain: bool = True) -> None:
        """Close all models; with ``drain`` once nobody holds one, else requests that run fail. New ones are refused."""
        self._closing = True
        self._notify()
        while drain and any(loaded.users for loaded in self._all()):
            await self._change(None)
        await asyncio.gather(*(self._in_thread(loaded.model.close, drain) for loaded in self._all()))
        while self._tasks:  # also what is being loaded; it is closed at once
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self._places.values():
            place.current, place.former = None, []
        self._threads.shutdown(wait=False)

    # ------------------------------------------------------------------------------------------ small parts

    def _all(self) -> Iterator[_Loaded]:
        return (loaded for place in self._places.values() for loaded in place.all)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise UsageError("model", f"is {format_value(name)}, expected one of {', '.join(self._places)}")
        return self._places[name]

    def _refuse_closed(self) -> None:
        if self._closing:
            raise EngineClosedError("the service is stopping and takes no requests; try another one, or later")

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that lives as long as it runs; its error is also its own, for who waits for it may have gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self, timeout_s: float | None) -> bool:
        """Wait until a lease or a model ended; False if none did in time."""
        if timeout_s is not None and timeout_s <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


def _state(place: _Place) -> ModelState:
    current, failure = place.current, place.failure
    if current is not None:
        phase: Phase = "ready"
    elif place.loading is not None:
        phase = "loading"
    else:
        phase = "unloaded" if failure is None else "failed"
    return ModelState(
        phase,
        None if failure is None else hide_path(failure.error),
        sum(loaded.held for loaded in place.all),
        sum(loaded.memory for loaded in place.all),
        sum(loaded.users for loaded in place.all),
        len(place.former),
        place.loads,
    )


def _refuse_failed(place: _Place) -> None:
    """Answer with the error of an attempt a moment ago, unless another bundle was published or only memory lacked."""
    failure = place.failure
    if failure is None or isinstance(failure.error, ResourceError) or time.monotonic() >= failure.until:
        return
    if (failure.folder, failure.published) == (place.folder, publication(place.folder)):
        raise BundleError(
            f"it could not be loaded a moment ago: {hide_path(failure.error)}", path=place.folder
        ) from failure.error
