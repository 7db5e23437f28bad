"""The fleet on Ray: its deployments, and what Ray is told of them."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from llmc.bundle import read_bundle
from llmc.runtime.api import DRAFT_WORDS
from llmc.runtime.host.machine import usable_threads
from llmc.runtime.server.config import ServerConfig, read_config
from llmc.runtime.server.fleet.calls import Forwarded, ReplicaLostError
from llmc.runtime.server.fleet.front import make_front
from llmc.runtime.server.fleet.replica import Replica
from llmc.runtime.server.fleet.stages import find_places
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.guarded import Guarded

# Ray asks a replica so often, and gives it so long; a replica that computes answers between two steps.
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0
REFRESH_S = 600.0  # in which every replica has to have loaded its bundles
QUEUE = 256  # requests that wait, where the settings say nothing: as many as an engine lets wait
# Requests of a replica, as multiples of its rows, beyond which a conversation goes to another one.
BUSY = 2
FRONT_CPUS = 0.1  # reserved; a front waits more than it computes
LOST = (RayActorError, WorkerCrashedError)


class RayReplicas:
    """The replicas behind a handle of their deployment."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)

    async def answer(self, call: Forwarded) -> AsyncGenerator[list[Message], None]:
        answer: Any = self._answers.options(session_id=call.session).remote(call.scope, call.body)
        try:
            async for messages in answer:
                yield messages
        except LOST as error:
            raise ReplicaLostError(str(error).splitlines()[0]) from error
        except BackPressureError as error:
            said = f"{error.args[0]} requests wait for a replica, as many as may; try again later"
            raise ApiError(429, said, code="queue_full", retry_after_s=1) from error
        finally:
            answer.cancel()  # nothing, if it has ended

    async def refresh(self) -> dict[str, Exception | None]:
        """Have every replica swap models that were published anew; what failed, by replica."""
        found = await self._handle.broadcast("try_refresh").results_async(timeout_s=REFRESH_S)
        return dict(found)


class _Deployed(Replica):
    async def __del__(self) -> None:
        """Called by Ray when the replica is to go and no request is left."""
        await self.close()


def replicas_of(config: ServerConfig) -> serve.Application:
    """The deployment of the replicas, bound to these settings."""
    manifests = [read_bundle(folder) for folder in config.models.values()]
    rows = config.max_batch or max(manifest.limits.max_batch for manifest in manifests)
    waiting = config.max_queue or QUEUE
    least = config.ray_min_replicas
    most = max(least, config.ray_max_replicas or least)
    cpus = config.ray_cpus or config.threads or max(1, usable_threads() // most)
    places = find_places(manifests)
    deployment = serve.deployment(
        name="replicas",
        user_config={
            "models": {name: str(folder.absolute()) for name, folder in config.models.items()},
            "revision": "",
        },
        max_ongoing_requests=BUSY * rows,
        max_queued_requests=waiting,
        autoscaling_config=AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=rows),
        ray_actor_options={"num_cpus": cpus, "num_gpus": config.ray_gpus, "resources": places},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_s,
        request_router_config={
            "request_router_class": f"{ConsistentHashRouter.__module__}:{ConsistentHashRouter.__name__}",
            "request_router_kwargs": {"num_fallback_replicas": most - 1},
        },
    )
    # Stored responses would have to be found again at the replica that has them.
    own = replace(_absolute(config), models={}, threads=config.threads or max(1, int(cpus)), response_store_bytes=0)
    return deployment(_Deployed).bind(own)


def _absolute(config: ServerConfig) -> ServerConfig:
    """The settings with paths that hold in any folder that a replica may start in."""
    folder, draft = config.prefix_cache_folder, config.draft
    return replace(
        config,
        prefix_cache_folder=None if folder is None else folder.absolute(),
        draft=draft if draft in DRAFT_WORDS else str(Path(draft).absolute()),
    )


@serve.ingress()
class Front:
    """A front behind Ray's HTTP proxy."""

    def __init__(self, config: ServerConfig, replicas: "DeploymentHandle[Any]") -> None:
        self._config = config
        self._replicas = RayReplicas(replicas)

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray for the application that it is to serve."""
        return Guarded(make_front(self._replicas), self._config)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application that ``serve run`` and KubeRay deploy: ``import_path: llmc.runtime.server.fleet.cluster:build``.

    Connections are those of Ray's HTTP proxies, so settings of addresses, certificates, timeouts and connections are
    Ray's; every other one holds. Rates count for each front.

    Args:
        args: ``config``, a file of settings; or settings by their names, which go before it.

    Raises:
        UsageError: a setting is unknown or wrong, or neither keys_file nor allow_no_keys is there.
        BundleError: a folder is no bundle on the machine that builds the application.
    """
    flags = {"host": "0.0.0.0", **args}  # as Ray's proxies do on Kubernetes: keys, or allow_no_keys
    file = flags.pop("config", None)
    config = read_config(None if file is None else Path(file), flags)
    front = serve.deployment(
        name="front",
        max_ongoing_requests=config.max_connections,
        ray_actor_options={"num_cpus": FRONT_CPUS},
        graceful_shutdown_timeout_s=config.drain_s,
    )
    return front(Front).bind(config, replicas_of(config))
