"""How Serve routes calls of a stage: to the replica that the scheduler has chosen."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cauc_ray.serving.packing import StageCall


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Routes a call to the replica that it names. Where that is gone, another says so."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that may take a call."""
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, StageCall):
            return [candidate_replicas]
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # else what cannot be routed is tried without a pause
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == call.replica]
        return [named or candidate_replicas]
