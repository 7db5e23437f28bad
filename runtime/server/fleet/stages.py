"""The stages of a model on the boxes of a cluster of Ray: an actor for each before the last, which the engine runs."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from llmc.bundle import STAGE_FOLDER, Manifest
from llmc.errors import LlmcError, ResourceError
from llmc.runtime.host.huge_pages import gather_soon, note_others
from llmc.runtime.host.integrity import check_files
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.kv.budget import check_load
from llmc.runtime.kv.rows import TornError
from llmc.runtime.sessions import open_engine
from llmc.runtime.sessions.base import Batch
from llmc.runtime.sessions.staged import Stages, ask, pack, read_stage, unpack

log = logging.getLogger(__name__)

# A stage that does not answer for so long is lost; it may have to load its weights before.
REPLY_S = 600.0
ALIVE_S = 30.0  # the same of one that computes a few calls at most
SHARE = 0.001  # of a box's resource: a place, and no amount


class StageActor:
    """A stage in a process of its own, with no more threads than its box has."""

    def open(self, folder: Path, number: int, wanted: str, threads: int, exact: bool) -> None:
        """Raises BundleError: the stage is missing, damaged or of another build; ResourceError: memory lacks."""
        place, manifest = folder / STAGE_FOLDER.format(number), read_stage(folder, number, wanted)
        check_load(place, manifest, manifest.limits.max_context)
        check_files(place, manifest, None)
        others = note_others(manifest.memory["weights"].fixed)
        self._session, self._exact = open_engine(place, manifest, min(threads, usable_threads())), exact
        gather_soon(others)

    def run(self, batch: Batch, hidden: Any) -> Any:
        hidden = hidden if self._exact or hidden is None else unpack(hidden)
        found = self._session.run(batch if hidden is None else batch.feed(hidden=hidden))
        return found if self._exact else pack(found)

    def ask(self, name: str, arguments: Sequence[Any]) -> Any:
        return ask(self._session, name, arguments)


def find_place(number: int) -> dict[str, float]:
    """Resources to ask Ray for, so that a stage runs on the box that has its name for a resource, if some box has."""
    name, resources = STAGE_FOLDER.format(number), ray.cluster_resources()  # type: ignore[no-untyped-call]
    return {name: SHARE} if name in resources else {}


def find_places(manifests: Iterable[Manifest]) -> dict[str, float]:
    """Resources to ask Ray for, so that the last stages of models run on their boxes."""
    return {name: share for it in manifests if it.stage.before for name, share in find_place(it.stage.number).items()}


class StagesOnRay(Stages):
    """The stages before the last, each in an actor; one that is lost is started anew. Hidden states are float16 on the
    wire (:func:`pack`), or float32 if they are to be ``exact``.
    Raises BundleError, ResourceError: a stage cannot be opened on its box."""

    apart = True

    def __init__(self, folder: Path, manifest: Manifest, threads: int, exact: bool) -> None:
        self._folder, self._threads, self._hashes = folder, threads, manifest.stage.before
        self.exact = exact
        self._places = [find_place(number) for number in range(len(self._hashes))]
        self._actors, self._opening = dict[int, Any](), dict[int, Any]()
        self._reserved: Sequence[Any] = ()
        for number in range(len(self._hashes)):
            self._start(number)
        try:
            self._wait()
        except TornError as error:  # whose cause is what users read
            raise error.__cause__ or error from None

    def submit(self, batch: Batch) -> Any:
        """See :class:`Stages`; hidden states go from box to box, and not by way of this one."""
        self._wait()
        hidden = None
        for number in sorted(self._actors):
            hidden = self._actors[number].run.remote(batch, hidden)
        return hidden

    def fetch(self, promise: Any) -> Any:
        """See :class:`Stages`. Raises TornError: a stage was lost, and with it what all rows of the cache held."""
        found = self._get(promise)
        return found if self.exact else unpack(found)

    def _get(self, promise: Any) -> Any:
        """The value that a reference of Ray's, or several, stand for."""
        try:
            return ray.get(promise, timeout=REPLY_S)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, RayError):  # what the stage itself raised
                raise cause from None
            log.warning("a stage does not answer: %s", str(error).partition("\n")[0])
            lost = [number for number, actor in self._actors.items() if not _is_alive(actor)]
            for number in lost:
                self._start(number)
            said = f"stage {' and '.join(map(str, lost)) or '?'} of the model was lost, and what it held of the prompt"
            raise TornError(said) from ResourceError(f"{said}; it is started anew: ask again")

    def ask(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """See :class:`Stages`."""
        self._wait()
        if name == "reserve":
            self._reserved = arguments
        asked = [self._actors[number].ask.remote(name, given) for number, given in enumerate(arguments)]
        found: list[Any] = self._get(asked)
        return found

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def _start(self, number: int) -> None:
        """Start an actor, in the place of one before it perhaps, which had as much room in its cache."""
        if number in self._actors:
            ray.kill(self._actors[number])
        options = {"num_cpus": 0, "resources": self._places[number], "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(StageActor).options(**options).remote()
        self._actors[number] = actor
        asked = self._folder, number, self._hashes[number], self._threads, self.exact
        self._opening[number] = [actor.open.remote(*asked)]
        if self._reserved:
            self._opening[number].append(actor.ask.remote("reserve", self._reserved[number]))

    def _wait(self) -> None:
        """Wait for stages that are being opened; one that cannot be is started again for the next request."""
        for number, opening in list(self._opening.items()):
            try:
                self._get(opening)
            except LlmcError:
                self._start(number)
                raise
            del self._opening[number]


def _is_alive(actor: Any) -> bool:
    try:
        return ray.get(actor.__ray_ready__.remote(), timeout=ALIVE_S) is not None
    except RayError:
        return False
