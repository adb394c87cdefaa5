"""Ray Serve's request router that keeps requests of one prefix on one replica.

Owns nothing but the joint: what Ray knows of replicas (which there are, how many requests each has)
goes to `affinity`, and its order of them comes back. Queues, retries, limits and the removal of
dead replicas are Ray's.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kdecode.replicas.affinity import Affinity
from kdecode.replicas.asgi import Call


class PrefixRouter(RequestRouter):
    def initialize_state(self, *, max_load_gap: int) -> None:
        """Called by Ray with the router's settings."""
        self._affinity = Affinity(max_load_gap)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Between rounds in which every replica was full, Ray shall wait, and not spin.
            pending_request.routing_context.should_backoff = True
        replicas = {_key(replica.replica_id): replica for replica in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        names = _names(pending_request)
        order = self._affinity.order(names, loads)
        if order:
            # Now, so that requests which come at the same time stay together.
            self._affinity.learn(names, order[0])
        return [[replicas[key]] for key in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        # Not always the first of the order: that one may have been full.
        self._affinity.learn(_names(pending_request), _key(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.keep_only(set(map(_key, self.curr_replicas)))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        if before - set(self.curr_replicas):
            self._affinity.keep_only(set(map(_key, self.curr_replicas)))

    async def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Requests that each replica has, by Ray's cache, and by asking where that is too old."""
        known = {r.replica_id: self.replica_queue_len_cache.get(r.replica_id) for r in replicas}
        unknown = [replica for replica in replicas if known[replica.replica_id] is None]
        for replica, load in await self._probe_queue_lens(unknown, 0):
            known[replica.replica_id] = load
        # One that does not answer is the last choice; Ray finds out what is wrong with it.
        last = max((load for load in known.values() if load is not None), default=0) + 1
        return {_key(key): last if load is None else load for key, load in known.items()}


def _key(replica_id: ReplicaID) -> str:
    key: str = replica_id.unique_id
    return key


def _names(pending_request: PendingRequest | None) -> tuple[str, ...]:
    if pending_request is None:
        return ()
    call = next((item for item in pending_request.args if isinstance(item, Call)), None)
    return call.names if call is not None else ()
