"""The request router of Ray Serve that sends a request to the replica which holds its prefix."""

from typing import TYPE_CHECKING, Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llmc.runtime.server.fleet.affinity import Affinity

if TYPE_CHECKING:
    from ray.serve._private.replica_result import ReplicaResult


class PrefixRouter(RequestRouter):
    """Ask :class:`Affinity` for the order of replicas; Ray takes the first one that has room.

    Requests bring the names of their prompt's blocks as the keyword ``prefix``.
    """

    def initialize_state(self, rows: int = 1, **kwargs: Any) -> None:
        """Called by Ray with what the deployment says for its router: ``rows`` as in :class:`Affinity`."""
        self._affinity = Affinity(rows)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queued = self.replica_queue_len_cache
        loads = {name: queued.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Ray would ask again without a pause
        return [[replicas[name]] for name in self._affinity.order(_prefix(pending_request), loads)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: "ReplicaResult"
    ) -> None:
        self._affinity.note(_prefix(pending_request), replica_id.unique_id)


def _prefix(request: PendingRequest | None) -> tuple[bytes, ...]:
    return () if request is None else request.kwargs.get("prefix", ())
