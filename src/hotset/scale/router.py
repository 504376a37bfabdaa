"""Ray Serve's router of requests, which uses a PrefixTable. Serve creates it in the front's process."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hotset.scale.routing import PrefixTable

_ARRIVES_SECONDS = 5.0  # for a request to arrive at its replica


class _Placed(NamedTuple):
    """The replica of a request; until: time.monotonic() seconds at which the entry expires."""

    replica: str
    until: float


class PrefixRouter(RequestRouter):
    """A router that sends a request to the replica with its prefix; its first argument is the prefix's keys.

    by_prefix: False sends each request to any replica, for comparison.
    """

    def initialize_state(self, by_prefix: bool = True) -> None:
        self._by_prefix = by_prefix
        self._table = PrefixTable()
        self._placed: dict[str, _Placed] = {}  # by request
        self._known: set[str] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return a rank for each replica, the best first."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        if not self._by_prefix or pending_request is None:
            return [[one] for one in random.sample(candidate_replicas, len(candidate_replicas))]
        self._forget_gone()
        counts = Counter(placed.replica for placed in self._placed.values())
        order = self._table.order(_keys(pending_request), {name: counts[name] for name in by_name})
        if order:  # counted at once: other requests may be placed before this one has arrived
            self._place(pending_request, order[0], time.monotonic() + _ARRIVES_SECONDS)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        self._place(pending_request, replica_id.unique_id, math.inf)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        self._placed.pop(internal_request_id, None)

    def _place(self, request: PendingRequest, replica: str, until: float) -> None:
        self._placed[request.metadata.internal_request_id] = _Placed(replica, until)
        self._table.note(_keys(request), replica)

    def _forget_gone(self) -> None:
        """Remove replicas that are gone, and requests that never arrived."""
        now, alive = time.monotonic(), {one.unique_id for one in self.curr_replicas}
        for replica in self._known - alive:
            self._table.forget(replica)
        self._known = alive
        for request, placed in list(self._placed.items()):
            if placed.until < now or placed.replica not in alive:
                del self._placed[request]


def _keys(request: PendingRequest | None) -> list[str]:
    return list(request.args[0]) if request is not None and request.args else []
