"""The stages of a model on the boxes of a cluster of Ray: an actor for each before the last, which the engine runs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from llmc.bundle import STAGE_FOLDER, Manifest
from llmc.errors import LlmcError, ResourceError
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.kv.rows import TornError
from llmc.runtime.sessions.base import Batch, Session
from llmc.runtime.sessions.staged import ask, open_stage

log = logging.getLogger(__name__)

# A stage that does not answer for so long is lost; it may have to load its weights before.
REPLY_S = 600.0
ALIVE_S = 30.0  # the same of one that computes at most a few calls
# Of a box's resource that bears a stage's name: a place, and no amount.
SHARE = 0.001


class StageActor:
    """A stage in a process of its own, on whatever box Ray placed it."""

    _session: Session

    def open(self, folder: Path, number: int, wanted: str, threads: int) -> None:
        """See :func:`open_stage`; ``threads`` at most."""
        self._session = open_stage(folder, number, wanted, min(threads, usable_threads()))

    def run(self, batch: Batch, hidden: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        return self._session.run(replace(batch, hidden=hidden))

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return ask(self._session, name, arguments)

    def answer(self) -> None:
        """Do nothing, for somebody who asks if there is anybody."""


def find_place(manifest: Manifest, number: int) -> dict[str, float]:
    """What Ray is asked for, so that a stage runs on the box that has its name for a resource, if there is one."""
    name = STAGE_FOLDER.format(number)
    return {name: SHARE} if manifest.stage is not None and name in ray.cluster_resources() else {}


class StagesOnRay:
    """The stages before the last; one that is lost is started anew, and whoever had rows of the cache is told.

    Raises:
        BundleError, ResourceError: a stage cannot be opened on its box.
    """

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        self._given = folder, threads
        self._hashes = manifest.stage.before if manifest.stage else ()
        self._places = [find_place(manifest, number) for number in range(len(self._hashes))]
        self._reserved: Sequence[tuple[Any, ...]] = ()
        self._opening: dict[int, Any] = {}
        self._actors = [self._start(number) for number in range(len(self._hashes))]
        self._wait()

    def submit(self, batch: Batch) -> Any:
        """See :class:`llmc.runtime.sessions.staged.Stages`; the promise is a reference of Ray's."""
        self._wait()
        first, *others = self._actors
        hidden = first.run.remote(batch)
        for actor in others:  # from box to box, and not by way of this one
            hidden = actor.run.remote(batch, hidden)
        return hidden

    def fetch(self, promise: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._get(promise)
        return found

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._wait()
        if name == "reserve":
            self._reserved = arguments
        asked = [actor.ask.remote(name, given) for actor, given in zip(self._actors, arguments, strict=True)]
        found: list[Any] = self._get(asked)
        return found

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _start(self, number: int) -> Any:
        """A new actor, which has as many rows and positions as the one before it."""
        folder, threads = self._given
        options = {"num_cpus": 0, "resources": self._places[number], "scheduling_strategy": "SPREAD"}
        actor = ray.remote(StageActor).options(**options).remote()  # type: ignore[attr-defined]
        self._opening[number] = actor.open.remote(folder, number, self._hashes[number], threads)
        if self._reserved:
            actor.ask.remote("reserve", self._reserved[number])
        return actor

    def _wait(self) -> None:
        """Wait for stages that are being opened; one that cannot be is tried again the next time."""
        for number, opening in list(self._opening.items()):
            try:
                self._get(opening)
            except LlmcError:
                self._replace(number)
                raise
            del self._opening[number]

    def _get(self, promise: Any) -> Any:
        try:
            return ray.get(promise, timeout=REPLY_S)
        except RayTaskError as error:  # of its own, as if it had been raised here
            raise error.cause from None
        except (RayError, GetTimeoutError) as error:
            log.warning("a stage was lost: %s", str(error).splitlines()[0])
            lost = [number for number, actor in enumerate(self._actors) if not _is_alive(actor)]
            for number in lost:
                self._replace(number)
            said = f"stage {' and '.join(map(str, lost)) or 'an unknown one'} of the model was lost with what it held"
            raise TornError(said) from ResourceError(f"{said}; it is started anew: ask again")

    def _replace(self, number: int) -> None:
        ray.kill(self._actors[number])
        self._actors[number] = self._start(number)


def _is_alive(actor: Any) -> bool:
    try:
        ray.get(actor.answer.remote(), timeout=ALIVE_S)
    except RayError:
        return False
    return True
