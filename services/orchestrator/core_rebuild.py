"""The role table after the broker lost its last moments: made anew from what workers and node agents report. Pure.

Which table was in force is not known any more, but what runs is: each worker says in its heartbeat whether it serves, as
what, and under which role generation. A dedicated worker that serves goes on, its requests undisturbed. Everything else
begins again above whatever may have been given out: incarnations, role generations and plan numbers are never used twice.

On training GPUs nobody may be believed: what the table says of a pair's device memory may be of before the loss. So each overlap
slot gets a new process (its node agent ends the old one first), which says that it holds nothing; and the trainer is asked for
its memory before the next borrow, whatever it was asked before (`Pair.unsure`).
"""

from __future__ import annotations

import msgspec

from messages.ids import (
    Activity,
    Epoch,
    Incarnation,
    PolicyVersion,
    Residency,
    Role,
    RoleGeneration,
    Stage,
    WorkerId,
    Zone,
)
from pearl_state.model import NO_VERSION, ROLLOUT_ROLES, RoleTable, Row

GENERATIONS_LOST = 1000
"""More role generations than one row goes through in what a broker may lose; the next one is so far above the last known."""
PLANS_LOST = 1000
"""More plans than are made in it."""


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's newest heartbeat."""

    worker: WorkerId
    incarnation: int
    serving: bool
    role: Role
    role_generation: int
    version: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the cluster apart from the table's bucket."""

    seen_epoch: int = 0  # the newest that this process, or any holder of a replica, has seen
    newest: tuple[tuple[WorkerId, int], ...] = ()  # incarnations that node agents speak of, running or ended
    reports: tuple[WorkerReport, ...] = ()
    last_event: int = 0  # newest sequence of the event stream


def why_rewound(table: RoleTable, evidence: Evidence) -> str:
    """What shows that the bucket, or the stream that it has accounted for, is older than the cluster; "" if nothing does."""
    if evidence.seen_epoch > table.epoch:
        return f"epoch {evidence.seen_epoch} has been seen, the bucket has epoch {table.epoch}"
    if table.writer.cursor > evidence.last_event:
        return f"events up to {table.writer.cursor} are accounted for, the stream ends at {evidence.last_event}"
    rows = table.by_worker
    for worker, incarnation in evidence.newest:
        row = rows.get(worker)
        if row is not None and row.zone is not Zone.TRAINING and incarnation > row.incarnation:
            return f"{worker} has had incarnation {incarnation}, the table is at {row.incarnation}"
    return ""


def rebuilt(table: RoleTable, evidence: Evidence, cursor: int, now_ms: int) -> RoleTable:
    """The table that fits what runs, without plan or target. `cursor`: the event before the first that it is to take in.

    Its epoch is above all that were seen. It holds every invariant by itself; it does not follow from `table` by legal moves.
    """
    newest: dict[str, int] = {}
    for worker, incarnation in evidence.newest:
        newest[worker] = max(newest.get(worker, 0), incarnation)
    reports: dict[str, WorkerReport] = {}
    for report in evidence.reports:
        newest[report.worker] = max(newest.get(report.worker, 0), report.incarnation)
        known = reports.get(report.worker)
        if known is None or report.incarnation >= known.incarnation:
            reports[report.worker] = report
    rows = tuple(_row(row, newest.get(row.worker, 0), reports.get(row.worker)) for row in table.rows)
    by_worker = {row.worker: row for row in rows}
    pairs = tuple(
        msgspec.structs.replace(pair, residency=Residency.DRAINING, deadline_ms=0, unsure=True)
        if by_worker[pair.overlap].incarnation > 0
        else msgspec.structs.replace(pair, residency=Residency.TRAINING, deadline_ms=0)
        for pair in table.pairs
    )
    epoch = Epoch(max(table.epoch, evidence.seen_epoch) + 1)
    writer = msgspec.structs.replace(
        table.writer,
        cursor=cursor,
        plans=table.writer.plans + PLANS_LOST,
        target=None,
        target_seq=0,
        role_set=(),
        backoffs=(),
        hold_until_ms=0,
        release_epoch=epoch,
    )
    return msgspec.structs.replace(
        table,
        epoch=epoch,
        rows=rows,
        pairs=pairs,
        plan=None,
        admission_paused=None,
        policy_version=PolicyVersion(max([table.policy_version, *(row.version for row in rows if _serves(row))])),
        training_batch=None,
        training_since_ms=0,
        writer=writer,
        written_ms=max(table.written_ms, now_ms),
    )


def adopted(table: RoleTable) -> tuple[WorkerId, ...]:
    """The workers that serve in a rebuilt table."""
    return tuple(row.worker for row in table.rows if _serves(row))


def _serves(row: Row) -> bool:
    return row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING


def _row(row: Row, newest: int, report: WorkerReport | None) -> Row:
    """The row as its process reports it, or one that begins anew."""
    incarnation = max(row.incarnation, newest)
    generation = row.role_generation
    if report is not None and report.incarnation == incarnation:
        generation = max(generation, report.role_generation)
        if _may_go_on(row, report):
            same = row.incarnation == incarnation
            return msgspec.structs.replace(
                row,
                role=report.role,
                activity=Activity.ACTIVE,
                stage=Stage.NONE,
                incarnation=Incarnation(incarnation),
                role_generation=RoleGeneration(report.role_generation),
                endpoint=row.endpoint if same else "",
                version=PolicyVersion(report.version),
            )
    begun = incarnation > 0 and row.zone is Zone.OVERLAP
    return msgspec.structs.replace(
        row,
        activity=Activity.INACTIVE,
        stage=Stage.NONE,
        incarnation=Incarnation(incarnation + 1 if begun else incarnation),
        role_generation=RoleGeneration(generation + GENERATIONS_LOST),
        endpoint="",
        version=NO_VERSION,
        ready=False,
    )


def _may_go_on(row: Row, report: WorkerReport) -> bool:
    dedicated = row.zone in (Zone.RESERVED, Zone.PREEMPTIBLE)
    whole = report.serving and report.role in ROLLOUT_ROLES and report.version >= 0
    # One that serves under a generation below the table's was cut, and has not heard of it yet.
    return dedicated and whole and report.role_generation >= row.role_generation and report.incarnation > 0
