"""What an executor remembers about worker processes.

Pure; shared by the cluster rebuilder and the toggle manager, which execute the two parts of one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from messages.ids import Activity, Incarnation, PlanId, PolicyVersion, RoleGeneration, WorkerId
from messages.node_agent import Launch
from messages.orchestrator import (
    RoleSet,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from pearl_state.model import NO_VERSION, RoleTable, Row, WriterState

Fact = WorkerReady | WeightsApplied | RoleSet | WorkerDrained | WorkerReleased | WorkerActivated | WorkerGone
"""What a worker, or its node agent, says about one incarnation."""

NO_GENERATION = RoleGeneration(-1)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The newest incarnation of a worker that was launched here or heard of. Times are Unix ms; 0: not yet."""

    worker: WorkerId
    incarnation: Incarnation
    launched_ms: int = 0
    ready_ms: int = 0
    gone: bool = False
    gone_reason: str = ""
    version: PolicyVersion = NO_VERSION
    drained: RoleGeneration = NO_GENERATION
    role_set: RoleGeneration = NO_GENERATION
    activated: RoleGeneration = NO_GENERATION  # overlap workers: the last Activate that was answered
    released: RoleGeneration = NO_GENERATION  # overlap workers: the last Deactivate that was answered

    @property
    def alive(self) -> bool:
        """A process of this incarnation may exist."""
        return not self.gone

    @property
    def ready(self) -> bool:
        """The process is up and answers commands."""
        return self.ready_ms > 0 and not self.gone


def learn(known: Progress | None, fact: Fact, now_ms: int) -> Progress:
    """`known` with a fact taken in. A fact about an older incarnation changes nothing; repeating one is harmless."""
    if known is None or fact.incarnation > known.incarnation:
        known = Progress(worker=fact.worker, incarnation=fact.incarnation)
    if fact.incarnation < known.incarnation or known.gone:
        return known
    if not isinstance(fact, WorkerGone) and not known.ready_ms:
        # Any answer proves the process is up: its WorkerReady may have left the stream, or be behind this one.
        known = msgspec.structs.replace(known, ready_ms=max(1, now_ms))
    match fact:
        case WorkerReady():
            return known
        case WeightsApplied():
            return msgspec.structs.replace(known, version=max(known.version, fact.version))
        case RoleSet():
            return msgspec.structs.replace(known, role_set=max(known.role_set, fact.role_generation))
        case WorkerDrained():
            return msgspec.structs.replace(known, drained=max(known.drained, fact.role_generation))
        case WorkerActivated():
            if fact.role_generation <= known.activated:
                return known
            # Fresh device memory: whatever version it held before, it holds none now.
            return msgspec.structs.replace(known, activated=fact.role_generation, version=NO_VERSION)
        case WorkerReleased():
            return msgspec.structs.replace(known, released=max(known.released, fact.role_generation))
        case WorkerGone():
            return msgspec.structs.replace(known, gone=True, gone_reason=fact.reason)


def remember(known: Sequence[Progress], new: Progress) -> tuple[Progress, ...]:
    """`known` with the worker's entry replaced; sorted by worker."""
    others = [entry for entry in known if entry.worker != new.worker]
    return tuple(sorted([*others, new], key=lambda entry: entry.worker))


class Mark(msgspec.Struct, frozen=True):
    """A report given about a plan: "prepared", "applied", "failed"; or "applying": when that stage was first seen."""

    plan_id: PlanId
    report: str
    at_ms: int = 0


def launched(known: Progress | None, launch: Launch, now_ms: int) -> Progress:
    """`known` once the first launch command of an incarnation is given."""
    if known is None or known.incarnation < launch.incarnation:
        known = Progress(worker=launch.worker, incarnation=launch.incarnation)
    if known.incarnation > launch.incarnation or known.launched_ms:
        return known
    return msgspec.structs.replace(known, launched_ms=max(1, now_ms))


def has_left(row: Row, known: Progress | None) -> bool:
    """No process of the row's incarnation is left, or the orchestrator has written it off (its node is lost)."""
    if row.activity is Activity.INACTIVE:
        return True
    if known is None:
        return False
    return known.incarnation > row.incarnation or (known.incarnation == row.incarnation and not known.alive)


def is_drained(row: Row, known: Progress | None) -> bool:
    """The row's process has answered the drain of its present generation (that of the cut epoch)."""
    return known is not None and known.incarnation == row.incarnation and known.drained >= row.role_generation


def slim(table: RoleTable, rows: Iterable[Row]) -> RoleTable:
    """A copy of the table with only `rows`, and without what executors do not read (a checkpoint holds it)."""
    kept = tuple(msgspec.structs.replace(row, gpus=(), endpoint="") for row in rows)
    return msgspec.structs.replace(table, rows=kept, writer=WriterState())
