"""The life of a plan in the table: start, cut epoch, admit epoch, drop, roll back (paper 4.4.2, 4.5). Pure.

Each function takes a table and returns the next one; none changes the epoch, which the core counts once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from messages.decision_engine import Leave
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Activity, PlanId, Role, RoleGeneration, Stage, WorkerId, Zone
from messages.orchestrator import TargetConfiguration
from pearl_state.model import Backoff, Move, PlanRecord, RoleTable, Row, change, with_rows
from pearl_state.plan import MinimalPlan
from services.orchestrator.config import Config
from services.orchestrator.core_planning import Draft

PREPARING = "preparing"
APPLYING = "applying"


def plan_message(table: RoleTable) -> ReconfigurationPlan:
    """The message that carries the table's plan. Executors obey it only while the table carries the same plan id."""
    plan = table.plan
    assert plan is not None, "there is a plan to publish"
    return ReconfigurationPlan(
        plan_id=plan.plan_id,
        decision_id=plan.decision_id,
        stage=plan.stage,
        epoch=table.epoch,
        add=plan.add,
        remove=plan.remove,
        reassign=plan.reassign,
        deadline_ms=plan.deadline_ms,
    )


def start(table: RoleTable, target: TargetConfiguration, draft: Draft, config: Config, now_ms: int) -> RoleTable:
    """The table with the draft as its plan: joiners launching (or adopted), unwanted preparing workers cancelled.

    A plan without joiners is cut at once.
    """
    assert table.plan is None, "one plan at a time"
    rows = table.by_worker
    changed = {worker: _cancelled(rows[worker]) for worker in draft.cancel}
    plan = draft.plan
    if plan.empty:
        return with_rows(table, changed.values())
    add: list[Assign] = []
    for placement in plan.add:
        row = rows[placement.worker]
        if row.activity is Activity.INACTIVE:
            row = change(row, Move.LAUNCH, role=placement.role, same_process=row.zone is Zone.OVERLAP)
        else:  # adopted: the same process, perhaps for another role
            row = msgspec.structs.replace(row, role=placement.role)
        changed[row.worker] = row
        add.append(_assign(row, placement.role, 1))
    must_by = {leave.worker: leave.deadline_ms for leave in target.leaving}
    record = PlanRecord(
        plan_id=PlanId(f"p{table.writer.plans + 1}"),
        decision_id=target.decision_id,
        stage=PREPARING,
        add=tuple(add),
        remove=tuple(Leave(w, must_by.get(w, now_ms + config.apply_ms)) for w in plan.remove),
        # The cut epoch takes one generation, the admit epoch the next.
        reassign=tuple(_assign(rows[p.worker], p.role, 2) for p in plan.reassign),
        started_ms=now_ms,
        deadline_ms=now_ms + config.preparing_ms,
        rebuilder=_part_of(rows, plan, overlap=False),
        toggle=_part_of(rows, plan, overlap=True),
    )
    writer = msgspec.structs.replace(table.writer, plans=table.writer.plans + 1, role_set=())
    table = msgspec.structs.replace(with_rows(table, changed.values()), plan=record, writer=writer)
    return table if add else cut(table, config, now_ms)


def _part_of(rows: Mapping[str, Row], plan: MinimalPlan, *, overlap: bool) -> str:
    """Whether an executor has a part in a plan: the cluster rebuilder in the dedicated zones, the toggle manager in overlap."""
    named = (*plan.remove, *(placement.worker for placement in (*plan.add, *plan.reassign)))
    return "pending" if any((rows[worker].zone is Zone.OVERLAP) is overlap for worker in named) else "none"


def _cancelled(row: Row, announced: RoleGeneration | None = None) -> Row:
    """A joiner taken back. An overlap worker lives on, and the generation it was to be activated with is used up."""
    if announced is None and row.zone is Zone.OVERLAP:
        announced = RoleGeneration(row.role_generation + 1)
    return change(row, Move.CANCEL, generation=announced)


def _assign(row: Row, role: Role, ahead: int) -> Assign:
    return Assign(row.worker, role, row.incarnation, RoleGeneration(row.role_generation + ahead))


def same_as(draft: Draft, plan: PlanRecord) -> bool:
    """Whether the plan in progress already makes the draft's changes."""
    return (
        {(p.worker, p.role) for p in draft.plan.add} == {(a.worker, a.role) for a in plan.add}
        and {(p.worker, p.role) for p in draft.plan.reassign} == {(a.worker, a.role) for a in plan.reassign}
        and set(draft.plan.remove) == {leave.worker for leave in plan.remove}
    )


def coherent(table: RoleTable) -> bool:
    """Whether the workers that a preparing plan will cut are still as it found them."""
    plan, rows = table.plan, table.by_worker
    assert plan is not None
    leavers = all(rows[leave.worker].activity is not Activity.INACTIVE for leave in plan.remove)
    return leavers and all(
        rows[assign.worker].incarnation == assign.incarnation
        and rows[assign.worker].activity is not Activity.INACTIVE
        and rows[assign.worker].role_generation + 2 == assign.role_generation
        for assign in plan.reassign
    )


def cut(table: RoleTable, config: Config, now_ms: int) -> RoleTable:
    """The cut epoch: those leaving or changing role are routed no more; admission pauses if there are joiners."""
    plan, rows = table.plan, table.by_worker
    assert plan is not None and plan.stage == PREPARING, "a plan is cut once, after its preparation"
    changed: list[Row] = []
    for leave in plan.remove:
        if rows[leave.worker].stage is not Stage.DRAINING:  # left over from an unfinished plan
            changed.append(change(rows[leave.worker], Move.DRAIN))
    changed += [change(rows[assign.worker], Move.SWITCH) for assign in plan.reassign]
    deadline_ms = now_ms + config.apply_ms
    # Mandatory returns never wait for joiners, so beside joiners all leave of the target's choice: within this section.
    remove = tuple(Leave(leave.worker, deadline_ms) for leave in plan.remove) if plan.add else plan.remove
    record = msgspec.structs.replace(plan, stage=APPLYING, remove=remove, deadline_ms=deadline_ms)
    paused = plan.plan_id if plan.add else None
    return msgspec.structs.replace(with_rows(table, changed), plan=record, admission_paused=paused)


def may_admit(table: RoleTable) -> bool:
    """Whether executors are done and every joiner holds the current version (paper 4.5, atomic finalisation)."""
    plan, rows = table.plan, table.by_worker
    assert plan is not None
    return (
        plan.stage == APPLYING
        and plan.rebuilder in ("applied", "none")
        and plan.toggle in ("applied", "none")
        and all(rows[assign.worker].version >= table.policy_version for assign in plan.add)
    )


def admit(table: RoleTable) -> RoleTable:
    """The admit epoch: the whole group becomes visible at once; leavers are gone; the pause ends."""
    plan, rows = table.plan, table.by_worker
    assert plan is not None and may_admit(table), "a plan is admitted when all of it is done"
    changed = [_admitted(rows[assign.worker], assign) for assign in plan.add]
    changed += [
        _admitted(rows[assign.worker], assign)
        for assign in plan.reassign
        if rows[assign.worker].stage is Stage.SWITCHING  # it may have died since the cut
    ]
    changed += [
        change(rows[leave.worker], Move.RETIRE) for leave in plan.remove if rows[leave.worker].stage is Stage.DRAINING
    ]
    joined = {assign.worker for assign in plan.add}
    backoffs = tuple(entry for entry in table.writer.backoffs if entry.worker not in joined)
    return _without_plan(with_rows(table, changed), backoffs=backoffs)


def _admitted(row: Row, assign: Assign) -> Row:
    return change(row, Move.ADMIT, role=assign.role, generation=assign.role_generation)


def drop(table: RoleTable) -> RoleTable:
    """The table without its preparing plan; its joiners go on preparing, for the next plan to adopt or cancel."""
    assert table.plan is not None and table.plan.stage == PREPARING, "what has begun to apply is not superseded"
    return _without_plan(table)


def roll_back(
    table: RoleTable, config: Config, now_ms: int, culprits: Collection[WorkerId], reason: str, *, late: bool = False
) -> RoleTable:
    """All or nothing: every joiner goes back. `culprits` are not planned with until their back-off ends.

    While applying, role-changers that already serve their new role are admitted in it, the others and the leavers are
    left to the next plan, which follows at once; with `late` (the deadline passed: they do not answer) they are given
    up instead. Generations announced to anyone are never used again.
    """
    plan, rows = table.plan, table.by_worker
    assert plan is not None, "there is a plan to roll back"
    changed: list[Row] = []
    for assign in plan.add:
        row = rows[assign.worker]
        if row.activity is Activity.TRANSITIONING:
            changed.append(_cancelled(row, assign.role_generation if plan.stage == APPLYING else None))
    if plan.stage == APPLYING:
        for assign in plan.reassign:
            row = rows[assign.worker]
            if row.stage is not Stage.SWITCHING:
                continue
            if assign.worker in table.writer.role_set:
                changed.append(_admitted(row, assign))
            else:
                changed.append(change(row, Move.RETIRE if late else Move.RECUT, generation=assign.role_generation))
        leavers = [rows[leave.worker] for leave in plan.remove if rows[leave.worker].stage is Stage.DRAINING]
        changed += [change(row, Move.RETIRE) for row in leavers if late]
    table = with_rows(table, changed)
    return _without_plan(
        back_off(table, config, now_ms, culprits),
        failed_plans=table.writer.failed_plans + 1,
        last_failure=f"{plan.plan_id}: {reason}",
        hold_until_ms=now_ms + config.hold_ms,
    )


def back_off(table: RoleTable, config: Config, now_ms: int, workers: Collection[WorkerId]) -> RoleTable:
    """The slots of these workers wait: twice as long at each failure in a row, within a bound."""
    known = {entry.worker: entry for entry in table.writer.backoffs}
    for worker in workers:
        failures = known[worker].failures + 1 if worker in known else 1
        wait_ms = min(config.backoff_most_ms, config.backoff_first_ms << min(failures - 1, 16))
        known[worker] = Backoff(worker, now_ms + wait_ms, failures)
    backoffs = tuple(known[worker] for worker in sorted(known))
    return msgspec.structs.replace(table, writer=msgspec.structs.replace(table.writer, backoffs=backoffs))


def suspects(table: RoleTable, named: Collection[WorkerId] = ()) -> tuple[WorkerId, ...]:
    """Who is to blame for a plan that fails: those named, else those behind, else all its joiners."""
    plan, rows = table.plan, table.by_worker
    assert plan is not None
    parts = [assign.worker for assign in (*plan.add, *plan.reassign)]
    blamed = [worker for worker in parts if worker in named]
    if not blamed and plan.stage == PREPARING:
        blamed = [assign.worker for assign in plan.add if rows[assign.worker].stage is not Stage.PREPARED]
    elif not blamed:
        blamed = [worker for worker in parts if worker not in table.writer.role_set]
        blamed += [assign.worker for assign in plan.add if rows[assign.worker].version < table.policy_version]
    return tuple(sorted(set(blamed or [assign.worker for assign in plan.add])))


def _without_plan(table: RoleTable, **writer: object) -> RoleTable:
    """The table with no plan in progress, and these fields of the writer's."""
    kept = msgspec.structs.replace(table.writer, role_set=(), **writer)
    return msgspec.structs.replace(table, plan=None, admission_paused=None, writer=kept)
