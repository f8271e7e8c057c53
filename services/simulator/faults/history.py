"""What has been seen so far of a simulated run, as every checker needs it: tables, facts, processes, device memory, outages.

Kept once and read by all checkers. It judges nothing. `checkers.Checkers` feeds it before it asks the checkers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import ClassVar

from messages.decision_engine import BudgetChanged
from messages.envelope import Message
from messages.ids import Activity, Residency, Role, WorkerId, Zone
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerActivated,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.subjects import node_of
from pearl_state.model import PlanRecord, RoleTable, Row
from services.jobfile import JobFile
from services.simulator.faults.record import (
    ActorBegan,
    ActorEnded,
    FaultBegan,
    FaultEnded,
    FaultsStopped,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    Seen,
    Stored,
    TableWritten,
)

Process = tuple[WorkerId, int]
"""A worker slot and an incarnation of it."""
SETTLING_MS = 1_500
"""After an actor is back it needs so long to restore, to read what it missed and to act on it."""
LEASE_MS = 3_000
"""An orchestrator's lease outlives it: until it has run out, nobody else may write the role table."""

CUTTING_OFF = frozenset({"crash", "freeze", "cut", "broker_down", "power_off", "loss", "slow_network", "deafen"})
"""Faults that keep an actor from acting, or its word from arriving; what workers do is none of them."""


class Outage:
    """A span in which an actor was down, frozen or cut off. `end_ms` None: it still is."""

    __slots__ = ("begin_ms", "end_ms")

    def __init__(self, begin_ms: int) -> None:
        self.begin_ms = begin_ms
        self.end_ms: int | None = None


class History:
    """See the module. Attributes are read by checkers, never written."""

    def __init__(self, job: JobFile) -> None:
        self.job = job
        self._zones = {node.name: node.zone for node in job.nodes}
        self.now_ms = 0
        self.table: RoleTable | None = None
        self.before: RoleTable | None = None  # the table before `table`
        self.rows: dict[str, Row] = {}
        self.rows_before: dict[str, Row] = {}
        self.tables: dict[int, RoleTable] = {}  # by epoch; the first that was written with it
        self.paused_since: dict[str, int] = {}  # plan -> when admission was first paused for it
        self.targets: dict[str, TargetConfiguration] = {}
        self.target: TargetConfiguration | None = None  # the newest one stored
        self.target_ms = 0
        self.budgets: dict[int, BudgetChanged] = {}
        self.served: set[tuple[WorkerId, int, int, Role]] = set()  # (worker, incarnation, generation, role) once active
        self.ready: set[Process] = set()
        self.applied: dict[Process, int] = {}  # newest version said to be applied
        self.role_set: set[tuple[WorkerId, int, int, Role]] = set()
        self.activated: dict[Process, int] = {}  # newest generation activated
        self.released: dict[Process, int] = {}  # newest generation released
        self.gone: set[Process] = set()  # reported as such
        self.given_up: set[str] = set()  # plans that an executor called failed or vetoed
        self.alive: dict[Process, ProcessBegan] = {}
        self.ended: set[Process] = set()
        self.holders: dict[tuple[str, int], set[Process]] = {}  # who may hold memory of a GPU
        self.lives: dict[str, int] = {}
        self.faults_stopped_ms: int | None = None
        self._outages: dict[str, list[Outage]] = {}
        self._faults: dict[int, tuple[str, Outage]] = {}

    def see(self, seen: Seen) -> None:
        """Take it in."""
        self.now_ms = seen.at_ms
        match seen:
            case TableWritten(table=table):
                self._on_table(table, seen.at_ms)
            case Stored(message=message):
                self._on_stored(message, seen.at_ms)
            case ProcessBegan():
                self.alive[seen.worker, seen.incarnation] = seen
                # One of whom nothing was ever heard may begin anew under its incarnation, on another machine.
                self.ended.discard((seen.worker, seen.incarnation))
                # Where GPUs are lent a process holds nothing before it says so.
                lent = self._zones.get(seen.node) is Zone.TRAINING
                self._hold(seen.node, seen.gpus, (seen.worker, seen.incarnation), not lent)
            case ProcessEnded():
                self._on_end((seen.worker, seen.incarnation))
            case MemoryHeld():
                self._hold(seen.node, seen.gpus, (seen.worker, seen.incarnation), seen.held)
            case ActorBegan(actor=actor):
                self.lives[actor] = self.lives.get(actor, 0) + 1
                self._close(actor, seen.at_ms)
            case ActorEnded(actor=actor):
                self._open(actor, seen.at_ms)
            case FaultBegan() if seen.kind in CUTTING_OFF:
                self._faults[seen.number] = (seen.target, self._open(seen.target, seen.at_ms))
            case FaultEnded(number=number):
                found = self._faults.pop(number, None)
                if found is not None:
                    found[1].end_ms = seen.at_ms
            case FaultsStopped():
                self.faults_stopped_ms = seen.at_ms
                for _, outage in self._faults.values():
                    outage.end_ms = seen.at_ms
                self._faults.clear()
            case _:
                pass

    # --- questions

    def plan(self) -> PlanRecord | None:
        """The plan in the newest table."""
        return None if self.table is None else self.table.plan

    def residency(self, overlap: str) -> Residency | None:
        """Of an overlap worker's pair, by the newest table."""
        pairs = () if self.table is None else self.table.pairs
        return next((pair.residency for pair in pairs if pair.overlap == overlap), None)

    def holds(self, process: Process) -> bool:
        """Whether the process may hold device memory now."""
        return any(process in holders for holders in self.holders.values())

    def excused_ms(self, actors: Iterable[str], begin_ms: int, end_ms: int) -> int:
        """How much of a span some of these actors could not act in; the time to settle after each outage is counted with it."""
        spans = sorted(
            (max(begin_ms, outage.begin_ms), min(end_ms, (outage.end_ms or end_ms) + _settling_ms(actor)))
            for actor in actors
            for outage in self._outages.get(actor, ())
        )
        total, reached = 0, begin_ms
        for begin, end in spans:
            if end > max(begin, reached):
                total += end - max(begin, reached)
                reached = end
        return total

    def known_actors(self) -> Collection[str]:
        """Every actor that was ever seen to start."""
        return self.lives.keys()

    def disturbed(self, worker: str, within_ms: int) -> bool:
        """Whether the node of a worker, or the whole network, was broken within this time."""
        names = (f"node_agent-{node_of(worker)}", node_of(worker), worker, "")
        return self.excused_ms(names, self.now_ms - within_ms, self.now_ms + 1) > 0

    # --- what was seen

    def _on_table(self, table: RoleTable, at_ms: int) -> None:
        self.before, self.table = self.table, table
        self.rows_before, self.rows = self.rows, table.by_worker
        self.tables.setdefault(table.epoch, table)
        if table.admission_paused is not None:
            self.paused_since.setdefault(table.admission_paused, at_ms)
        for row in table.rows:
            if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING:
                self.served.add((row.worker, row.incarnation, row.role_generation, row.role))

    def _on_stored(self, message: Message, at_ms: int) -> None:
        match message:
            case TargetConfiguration():
                if message.decision_id not in self.targets:
                    self.targets[message.decision_id] = message
                    self.target, self.target_ms = message, at_ms
            case BudgetChanged():
                self.budgets.setdefault(message.budget_id, message)
            case WorkerReady():
                self.ready.add((message.worker, message.incarnation))
            case WeightsApplied():
                _raise(self.applied, (message.worker, message.incarnation), message.version)
            case RoleSet():
                self.role_set.add((message.worker, message.incarnation, message.role_generation, message.role))
            case WorkerActivated():
                _raise(self.activated, (message.worker, message.incarnation), message.role_generation)
            case WorkerReleased():
                _raise(self.released, (message.worker, message.incarnation), message.role_generation)
            case WorkerGone():
                self.gone.add((message.worker, message.incarnation))
            case PlanProgress(report="failed" | "vetoed"):
                self.given_up.add(message.plan_id)
            case _:
                pass

    def _on_end(self, process: Process) -> None:
        self.alive.pop(process, None)
        self.ended.add(process)
        for holders in self.holders.values():
            holders.discard(process)

    def _hold(self, node: str, gpus: Collection[int], process: Process, held: bool) -> None:
        for gpu in gpus:
            holders = self.holders.setdefault((node, gpu), set())
            if held and process not in self.ended:
                holders.add(process)
            else:
                holders.discard(process)

    def _open(self, actor: str, at_ms: int) -> Outage:
        outage = Outage(at_ms)
        self._outages.setdefault(actor, []).append(outage)
        return outage

    def _close(self, actor: str, at_ms: int) -> None:
        for outage in self._outages.get(actor, ()):
            if outage.end_ms is None and all(outage is not open_ for _, open_ in self._faults.values()):
                outage.end_ms = at_ms


def _settling_ms(actor: str) -> int:
    return SETTLING_MS + (LEASE_MS if actor.startswith("orchestrator") else 0)


def _raise(known: dict[Process, int], process: Process, value: int) -> None:
    known[process] = max(value, known.get(process, value))


class Promise:
    """One thing that must always hold. A subclass names it and finds what breaks it, from what is seen and nothing else.

    `see` and `finish` say what is broken, a line each. `kinds` are the records that it wants to see.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[Seen], ...]]

    def __init__(self, history: History) -> None:
        self.history = history
        self.job = history.job

    def see(self, seen: Seen) -> Iterable[str]:
        """What this breaks."""
        raise NotImplementedError

    def finish(self) -> Iterable[str]:
        """What the end of the run shows to be broken."""
        return ()
