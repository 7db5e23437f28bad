"""The models of a service by name: loaded when asked for, within one plan of memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from llmc.bundle import Manifest, list_adapters
from llmc.errors import BundleError, GpuError, UsageError, format_value
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import MemoryNeed, default_memory
from llmc.runtime.server.models.loading import Loader
from llmc.runtime.server.models.place import ModelState, Neighbours, Place
from llmc.runtime.server.models.shares import MemoryShares, choose_idle
from llmc.runtime.text.chat_template import has_template

# A request waits so long for memory that other models' requests hold; about as long as a short answer takes.
PATIENCE_S = 10.0


class Pool(Neighbours):
    """Models by name, in one plan of memory. Its methods belong to one event loop; loading happens in threads.

    A model is loaded once, when a request first asks for it. Each gets a share of the memory
    (:class:`llmc.runtime.server.models.shares.MemoryShares`). Where the models do not fit together, the idle one that
    was used longest ago makes room; one in use never does. Without ``memory``, a single model is compared with what is
    available, as :func:`llmc.runtime.load` does, and several share what was available when the pool was made.

    Args:
        bundles: folders by name; :meth:`warm` loads the first one unless told otherwise.
        memory: bytes that this process may take.
        load_options: further arguments of :func:`llmc.runtime.load`, for all models; those that concern an engine are
            left out for bundles that have none.
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
        super().__init__()
        self.lost: GpuError | None = None
        self.patience_s = patience_s
        self.memory = memory if memory is not None or len(bundles) == 1 else default_memory()
        self._loader = Loader(load_options)
        formats = tool_formats or {}
        self._places = {
            name: Place(name, Path(folder), self._loader, formats.get(name), self) for name, folder in bundles.items()
        }
        needs = [(place.folder, self._loader.need(place.folder)) for place in self._places.values()]
        needed = sum(need.least for _, need in needs)
        self._shares = None if self.memory is None else MemoryShares(self.memory, needed)
        for folder, need in needs:
            self._loader.check_options(folder)
            if self._shares is not None:
                self._shares.check(need, folder)
        for place in self._places.values():
            place.adapters = tuple(self.list_adapters(place, place.folder))

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
        return sum(place.memory for place in self._places.values())

    def manifest(self, name: str) -> Manifest:
        """The manifest of the model that serves under a name, or would be loaded. Loads nothing.
        Raises UsageError: there is no such name; BundleError: the bundle is not there any more."""
        place, loaded = self.place(self.base(name)), self.models()
        return loaded[place.name].manifest if place.name in loaded else self._loader.read(place.folder)

    def has_template(self, name: str) -> bool:
        """True if the model that serves under a name, or would be loaded, has a chat template."""
        return has_template(self.place(self.base(name)).folder)

    def models(self) -> dict[str, LoadedBundle]:
        """Loaded models by name, to look at their metrics; to use one, lease it."""
        return {name: place.current.model for name, place in self._places.items() if place.current is not None}

    def states(self) -> dict[str, ModelState]:
        """The state of each model."""
        return {name: place.state() for name, place in self._places.items()}

    def place(self, name: str) -> Place:
        """The model of a name, to swap, unload or extend it. Raises UsageError: there is no such name."""
        if name not in self._places:
            raise UsageError("model", f"is {format_value(name)}, expected one of {', '.join(self._places)}")
        return self._places[name]

    # ------------------------------------------------------------------------------------------ requests

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Any]:
        """The model of a name, or of an adapter's, loaded if it is not; it stays for as long as the block lasts."""
        place = self.place(self.base(name))
        loaded = await place.take()
        try:
            yield loaded.model
        except GpuError as error:
            if error.lost:
                self.lost = error
            raise
        finally:
            place.release(loaded)

    async def warm(self, *names: str) -> None:
        """Load models before any request asks for them; the first one if none is named.
        Raises ResourceError: they do not fit together; LlmcError: as :meth:`lease` does."""
        async with AsyncExitStack() as held:  # all at once, so that none makes room for another
            for name in names or self.names[:1]:
                await held.enter_async_context(self.lease(name))

    # ------------------------------------------------------------------------------------------ changes

    async def refresh(self) -> dict[str, Exception | None]:
        """Swap every loaded model in whose folder another bundle was published, and take the others' adapters as their
        bundles have them; the error, or None, of each that was tried. What is not loaded is read anew when it is."""
        results: dict[str, Exception | None] = {}
        for name, place in self._places.items():
            try:
                if await place.refresh():
                    results[name] = None
            except Exception as error:  # noqa: BLE001 - logged; the old one serves, and the others have their turn
                results[name] = error
        return results

    async def close(self, drain: bool = True) -> None:
        """Close all models, with ``drain`` once no request holds one; else running requests fail. New ones are
        refused."""
        self.closing = True
        self.notify()
        while drain and any(loaded.users for place in self._places.values() for loaded in place.loaded):
            await self.change(None)
        models = [loaded.model for place in self._places.values() for loaded in place.loaded]
        await asyncio.gather(*(self.in_thread(model.close, drain) for model in models))
        while self._tasks:  # also what is being loaded; it is closed at once
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self._places.values():
            place.current, place.former = None, []
        self._threads.shutdown(wait=False)

    # ------------------------------------------------------------------------------------------ for its places

    def list_adapters(self, place: Place, folder: Path) -> dict[str, Path]:
        found = list_adapters(folder)
        others = self._places.keys() | {name for name, base in self.adapters.items() if base != place.name}
        if taken := sorted(others & found.keys()):
            raise BundleError(
                f"{place.name} has an adapter {taken[0]!r}, the name of another model or of another one's adapter",
                "add it under a name of its own",
                path=folder,
            )
        return found

    async def reserve(self, place: Place, folder: Path, need: MemoryNeed, patience_s: float) -> int | None:
        if self._shares is None:
            return None
        self._shares.check(need, folder)
        until = time.monotonic() + patience_s
        while missing := self._shares.missing(need, self.memory_taken):
            self.refuse_closed()
            if missing > self._leaving and self._evict(place):
                continue
            patience = None if missing <= self._leaving else until - time.monotonic()
            if not await self.change(patience):
                raise self._shares.refuse(missing, place.folder)
        return self._shares.share(need, self.memory_taken)

    async def make_way(self, place: Place) -> bool:
        if not self._evict(place):
            return False
        while any(loaded.users == 0 for other in self._places.values() for loaded in other.former):
            await self.change(None)
        return True

    @property
    def _leaving(self) -> int:
        return sum(place.leaving for place in self._places.values())

    def _evict(self, besides: Place) -> bool:
        """Unload the idle model that was used longest ago; False if all are in use."""
        idle = {
            place.current: place
            for place in self._places.values()
            if place.current is not None and place.wanted == 0 and place is not besides
        }
        oldest = choose_idle(idle)
        if oldest is not None:
            idle[oldest].retire()
        return oldest is not None
