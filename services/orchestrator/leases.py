"""Which workers must be assumed lost because their node agent is silent, or speaks of them no more. Pure but for its memory."""

from __future__ import annotations

from messages.ids import Activity, Stage, WorkerId, Zone
from messages.orchestrator import WorkerLost
from messages.runtime_tracker import NodeHeartbeat
from messages.subjects import node_of
from pearl_state.model import RoleTable


class NodeLeases:
    """Remembers when each node, and each worker process, was last heard of (Unix ms).

    A pause of our own (this process stood still, the bus was away) is no silence of others: everyone gets a new lease.
    """

    def __init__(self, lease_ms: int, now_ms: int) -> None:
        self._lease_ms = lease_ms
        self._grace_from = now_ms
        self._looked = now_ms
        self._nodes: dict[str, int] = {}
        self._workers: dict[tuple[WorkerId, int], int] = {}

    def heard(self, beat: NodeHeartbeat, now_ms: int) -> None:
        """A node agent's heartbeat arrived."""
        self._nodes[beat.node] = now_ms
        for worker, incarnation in beat.workers:
            self._workers[worker, incarnation] = now_ms

    def renew_all(self, now_ms: int) -> None:
        """We could not have heard anyone lately: begin to count anew."""
        self._grace_from = now_ms

    def lost(self, table: RoleTable, now_ms: int) -> tuple[WorkerLost, ...]:
        """The workers lost by now; call it several times a lease.

        A row that is not inactive on a node that is silent for `lease_ms` (a launching one only on a node that has
        been heard before: node agents may start after us, and a launch has its own time limit); and a row that serves, or is being cut,
        that its node's heartbeats do not name for `lease_ms` (a host that restarted knows nothing of what ran on it).
        """
        if now_ms - self._looked > self._lease_ms // 2:
            self.renew_all(now_ms)
        self._looked = now_ms
        found: list[WorkerLost] = []
        known: dict[tuple[WorkerId, int], int] = {}
        for row in table.rows:
            if row.zone is Zone.TRAINING or row.activity is Activity.INACTIVE:
                continue
            node = node_of(row.worker)
            if row.stage is Stage.LAUNCHING and node not in self._nodes:
                continue
            silent_ms = now_ms - max(self._nodes.get(node, 0), self._grace_from)
            reason = f"node {node} silent for {silent_ms} ms"
            if row.stage not in (Stage.LAUNCHING, Stage.PREPARED):
                # First seen counts as heard of: it has just been admitted.
                heard = known[row.worker, row.incarnation] = self._workers.get((row.worker, row.incarnation), now_ms)
                unnamed_ms = now_ms - max(heard, self._grace_from)
                if unnamed_ms > silent_ms:
                    silent_ms, reason = unnamed_ms, f"not named by node {node} for {unnamed_ms} ms"
            if silent_ms > self._lease_ms:
                found.append(WorkerLost(worker=row.worker, incarnation=row.incarnation, reason=reason))
        self._workers = known
        return tuple(found)
