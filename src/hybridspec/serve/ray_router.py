"""Ray Serve's choice of a replica by prefix.

A module of its own, since Ray carries the module of a request router to other processes by value.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hybridspec.serve.placement import Placement

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that `Placement` ranks first and that has room.

    The first argument of a call is the name of its prefix, or None.
    """

    def initialize_state(self, **options: Any) -> None:
        self._placement = Placement(**options)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        key = None if pending_request is None else next(iter(pending_request.args), None)
        order = self._placement.order(key, list(by_name))
        return [[by_name[name]] for name in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._placement.begin(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._placement.end(replica_id.unique_id)
