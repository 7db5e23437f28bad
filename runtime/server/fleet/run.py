"""``llmc serve --ray``: the front in this process, with all that a single server has around it, and its replicas."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.config import ProxyLocation
from ray.serve.schema import ApplicationStatus
from starlette.types import Message

from llmc.errors import EngineClosedError, GpuError, ResourceError, UsageError
from llmc.runtime.observe.logs import event
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.fleet.calls import Forwarded
from llmc.runtime.server.fleet.cluster import RayReplicas, replicas_of
from llmc.runtime.server.fleet.front import make_front
from llmc.runtime.server.http.guarded import Guarded
from llmc.runtime.server.http.logs import log_to_stderr
from llmc.runtime.server.run import run

log = logging.getLogger(__name__)

NAME = "llmc"  # of the application in the cluster
POLL_S = 0.5  # between two looks at how far the deployment is
TOLD_S = 30.0  # between two lines of the log that say what it waits for


def serve(config: ServerConfig) -> None:
    """Serve as :func:`llmc.runtime.server.run.serve` does, by replicas in Ray's cluster.

    The replicas end with this process. SIGHUP swaps the models of every replica in whose folders, on its own machine,
    another bundle was published.

    Raises:
        UsageError: an address, certificate or keys cannot be used, or there is no such cluster.
        ResourceError: the replicas cannot be started.
    """
    with log_to_stderr(config.log_format), connect_ray(config.ray_address):
        fleet = Fleet(config)
        run(config, fleet, Guarded(make_front(fleet), config))


@contextmanager
def connect_ray(address: str | None) -> Iterator[None]:
    """Ray, of the cluster at this address, or one that is started here and ends with the block."""
    own: dict[str, Any] = {}
    event(log, "starting Ray" if address is None else "joining Ray's cluster", address=address)
    if address is None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        own = {"include_dashboard": False}
        log.warning("Ray listens on all addresses of this machine, for whoever has its token; see the service's README")
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.WARNING, **own)
    except (ConnectionError, ValueError) as error:
        raise UsageError("ray_address", f"is {address!r}, where no cluster of Ray answers ({error})") from error
    try:
        yield
    finally:
        ray.shutdown()


def find_cause(message: str) -> str:
    """The last error of llmc's own in a message of Ray's, which has a traceback before it; else the whole message."""
    found: list[str] = re.findall(r"\bllmc\.errors\.\w+: (.+)", message)
    return found[-1] if found else message


class Fleet:
    """The replicas, deployed by :meth:`warm`, as the front and the server see them."""

    lost: GpuError | None = None  # a replica that loses its GPU is replaced

    def __init__(self, config: ServerConfig) -> None:
        self.names = tuple(config.models)
        self._application = replicas_of(config)
        self._deployed: asyncio.Future[RayReplicas] | None = None

    async def warm(self, *names: str) -> None:
        """Deploy, and wait until as many replicas are there as always shall be.
        Raises ResourceError: they cannot be started."""
        event(log, "starting replicas, which load the models")
        handle = await asyncio.to_thread(self._deploy)
        told = asyncio.get_running_loop().time()
        while (state := (await asyncio.to_thread(ray_serve.status)).applications[NAME]).status != "RUNNING":
            if state.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                said = " ".join([state.message, *(one.message for one in state.deployments.values())])
                raise ResourceError(f"the replicas cannot be started: {find_cause(said)}")
            if asyncio.get_running_loop().time() - told > TOLD_S:
                told += TOLD_S
                log.warning("waiting for replicas: %s", " ".join(one.message for one in state.deployments.values()))
            await asyncio.sleep(POLL_S)
        self._future().set_result(RayReplicas(handle))

    def _deploy(self) -> Any:
        ray_serve.start(proxy_location=ProxyLocation.Disabled, logging_config={"enable_access_log": False})
        target = ray_serve.RunTarget(self._application, name=NAME, route_prefix=None)
        return ray_serve.run_many([target], wait_for_applications_running=False)[0]

    async def answer(self, call: Forwarded) -> AsyncGenerator[list[Message], None]:
        async for messages in (await self._replicas()).answer(call):
            yield messages

    async def refresh(self) -> dict[str, Exception | None]:
        """Swap models in whose folders other bundles were published, at every replica; errors by replica."""
        failed = await (await self._replicas()).refresh()
        for name, error in failed.items():
            log.error("%s goes on with the bundles that it has: %s", name, error)
        return failed

    async def close(self, drain: bool = False) -> None:
        """End the replicas; requests that run fail unless ``drain``, new ones do in any case."""
        future = self._future()
        if not future.done():
            future.set_exception(EngineClosedError("the service is stopping and takes no requests; try another one"))
            future.exception()  # who waits for it is told; nobody need
        event(log, "deleting the replicas")
        await asyncio.to_thread(ray_serve.delete, NAME, _blocking=drain)

    async def _replicas(self) -> RayReplicas:
        return await asyncio.shield(self._future())

    def _future(self) -> "asyncio.Future[RayReplicas]":
        if self._deployed is None:
            self._deployed = asyncio.get_running_loop().create_future()
        return self._deployed
