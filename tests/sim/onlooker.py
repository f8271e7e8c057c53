"""Writes down what happens in `tests.sim.cluster`, as `services.simulator.faults.record`, and has it checked.

What that cluster does not have (routers, agents, requests) is not in the record; the checkers of tables, plans, GPUs,
decisions and returns see all that they need.
"""

from __future__ import annotations

from messages.subjects import node_of
from services.simulator.faults.check_decisions import Explained
from services.simulator.faults.check_work import NoTrajectoryLost
from services.simulator.faults.checkers import PROMISES, Checkers
from services.simulator.faults.record import (
    ActorBegan,
    ActorEnded,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Seen,
    Sent,
    Stored,
    TableWritten,
    Violation,
)
from tests.sim.cluster import Cluster
from tests.sim.processes import Process


class Onlooker:
    """Looks after everything that happens. `violations` is what the checkers found so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.violations: list[Violation] = []
        self.record: list[Seen] = []
        left_out = {NoTrajectoryLost} if cluster.decisions is None else {NoTrajectoryLost, Explained}
        self.checkers = Checkers(cluster.job, [promise for promise in PROMISES if promise not in left_out])
        self._cluster = cluster
        self._tables = self._events = self._commands = 0
        self._alive: dict[str, bool] = {}
        self._processes: dict[int, Process] = {}
        self._held: dict[int, bool] = {}
        cluster.world.after_each.append(self.look)
        self.look()

    def look(self) -> None:
        world = self._cluster.world
        now_ms = world.now_ms
        for name, actor in world.actors.items():
            if actor.alive is not self._alive.get(name, False):
                self._alive[name] = actor.alive
                self._see(ActorBegan(now_ms, name, 1) if actor.alive else ActorEnded(now_ms, name))
        self._look_at_processes(now_ms)
        for event in world.events[self._events :]:
            self._see(Stored(now_ms, "", event.seq, event.message))
        self._events = len(world.events)
        for table in world.tables[self._tables :]:
            self._see(TableWritten(now_ms, "orchestrator", table))
        self._tables = len(world.tables)
        for command in world.commands[self._commands :]:
            self._see(Sent(now_ms, command.sender, command.message))
        self._commands = len(world.commands)

    def _look_at_processes(self, now_ms: int) -> None:
        for node in self._cluster.nodes.values():
            for process in node.pids.values():
                if id(process) not in self._processes:
                    self._processes[id(process)] = process
                    self._see(
                        ProcessBegan(
                            now_ms,
                            node_of(process.worker),
                            process.worker,
                            process.incarnation,
                            process.service,
                            process.gpus,
                        )
                    )
        ended = [key for key, process in self._processes.items() if not process.alive and key in self._held]
        for key in ended:
            process = self._processes[key]
            del self._held[key]
            self._see(ProcessEnded(now_ms, node_of(process.worker), process.worker, process.incarnation))
        for key, process in self._processes.items():
            if process.alive and self._held.get(key) is not process.resident:
                self._held[key] = process.resident
                self._see(
                    MemoryHeld(
                        now_ms,
                        node_of(process.worker),
                        process.worker,
                        process.incarnation,
                        process.gpus,
                        process.resident,
                    )
                )

    def _see(self, seen: Seen) -> None:
        self.record.append(seen)
        self.violations += self.checkers.see(seen)
