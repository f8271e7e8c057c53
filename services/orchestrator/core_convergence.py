"""Moving the table towards its target: who owns training's GPUs, the plan in progress, or the next plan (paper 4.4). Pure.

Nothing here reads an input. Each function takes a table and returns one that is nearer to the target, or the same object
if there is nothing to do now; none changes the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.ids import Activity, Stage, WorkerId, Zone
from messages.orchestrator import TargetConfiguration
from pearl_state.model import Move, PlanRecord, RoleTable, change, with_rows
from pearl_state.plan import changes_of, first_wave
from services.orchestrator import core_lending as lending
from services.orchestrator import core_plans as plans
from services.orchestrator.config import Config
from services.orchestrator.core_planning import next_draft
from services.runtime.core import Effect, Note

MOST_ROUNDS = 12
"""Bound of moves in one step (drop, draft, cut, roll back, draft anew ...); more would be a loop."""


def due(table: RoleTable, now_ms: int) -> bool:
    """Whether time alone changes anything: a deadline, or a wait that ends."""
    writer = table.writer
    return (
        (table.plan is not None and now_ms >= table.plan.deadline_ms)
        or 0 < writer.hold_until_ms <= now_ms
        or any(0 < entry.until_ms <= now_ms for entry in writer.backoffs)
    )


def converge(table: RoleTable, config: Config, now_ms: int, notes: list[Effect]) -> RoleTable:
    """Move the table towards its target as far as it can go now."""
    table = _expire(table, now_ms)
    for _ in range(MOST_ROUNDS):
        before = table
        table = _hand_over(table, now_ms, notes)
        table = _advance(table, config, now_ms, notes)
        table = lending.settle(table, config, now_ms)
        if table is before:
            return table
    raise AssertionError(f"no fixed point after {MOST_ROUNDS} rounds; plan {table.plan}")


def _hand_over(table: RoleTable, now_ms: int, notes: list[Effect]) -> RoleTable:
    """Training owns its GPUs once nothing else is on them; this waits for no rollout plan."""
    target = table.writer.target
    if target is None or target.training_batch == table.training_batch:
        return table
    occupied = target.training_batch is not None
    if occupied and not lending.may_train(table):
        return table
    move = Move.OCCUPY if occupied else Move.VACATE
    rows = [
        change(row, move)
        for row in table.rows
        if row.zone is Zone.TRAINING and (row.activity is Activity.ACTIVE) is not occupied
    ]
    what = f"training owns its GPUs for batch {target.training_batch}" if occupied else "training is idle"
    notes.append(Note("training", what))
    return msgspec.structs.replace(
        with_rows(table, rows),
        pairs=lending.occupied(table) if occupied else lending.vacated(table),
        training_batch=target.training_batch,
        training_since_ms=now_ms if occupied else 0,
    )


def _advance(table: RoleTable, config: Config, now_ms: int, notes: list[Effect]) -> RoleTable:
    """One move of the plan in progress, or the next plan."""
    target, plan = table.writer.target, table.plan
    if target is None:
        return table
    if plan is None:
        return _plan_next(table, config, target, now_ms, notes)
    if plan.stage == plans.APPLYING:
        cut = lending.cut_returns(table, target)
        if cut is not table:
            notes.append(Note("plan_cut_short", f"plan {plan.plan_id} goes on without training's GPUs"))
            return cut
        table = _advance_applying(table, plan, notes)
    else:
        table = _advance_preparing(table, config, plan, target, now_ms, notes)
    # What has been reported counts, even if it is read late (this process may have been away): the deadline is last.
    if table.plan is plan and now_ms >= plan.deadline_ms:
        reason = f"not {'applied' if plan.stage == plans.APPLYING else 'prepared'} by its deadline"
        return fail(table, config, now_ms, plans.suspects(table), reason, notes, late=True)
    return table


def _advance_applying(table: RoleTable, plan: PlanRecord, notes: list[Effect]) -> RoleTable:
    if not plans.may_admit(table):
        return table
    notes.append(Note("plan_admitted", f"plan {plan.plan_id}: {_describe(plan)}"))
    return plans.admit(table)


def _advance_preparing(
    table: RoleTable, config: Config, plan: PlanRecord, target: TargetConfiguration, now_ms: int, notes: list[Effect]
) -> RoleTable:
    if not plans.coherent(table):
        notes.append(Note("plan_dropped", f"plan {plan.plan_id}: a worker that it was to change is gone"))
        return plans.drop(table)
    if plan.decision_id != target.decision_id:
        return _supersede(table, plan, target, now_ms, notes)
    urgent = next_draft(table, target, now_ms, whole_group=True)
    if not urgent.plan.empty and not urgent.plan.add:
        notes.append(Note("plan_dropped", f"plan {plan.plan_id}: survivors must change roles first"))
        return plans.drop(table)
    ready = plan.rebuilder in ("prepared", "none") and plan.toggle in ("prepared", "none")
    rows = table.by_worker
    if ready and all(rows[assign.worker].stage is Stage.PREPARED for assign in plan.add):
        changes = changes_of(plan)
        if first_wave(table.rows, changes, {leave.worker for leave in target.leaving}) != changes:
            notes.append(Note("plan_dropped", f"plan {plan.plan_id}: those who were to serve on meanwhile are gone"))
            return plans.drop(table)
        return plans.cut(table, config, now_ms)
    return table


def _plan_next(
    table: RoleTable, config: Config, target: TargetConfiguration, now_ms: int, notes: list[Effect]
) -> RoleTable:
    draft = next_draft(table, target, now_ms)
    if draft.plan.empty and not draft.cancel:
        return table
    table = plans.start(table, target, draft, config, now_ms)
    if table.plan is not None:
        why = f"; {draft.fallback}" if draft.fallback else ""
        what = f"plan {table.plan.plan_id} for {target.decision_id}: {_describe(table.plan)}{why}"
        notes.append(Note("plan", what))
    return table


def _supersede(
    table: RoleTable, plan: PlanRecord, target: TargetConfiguration, now_ms: int, notes: list[Effect]
) -> RoleTable:
    """A newer target while the plan is preparing: keep it where it still is what the target wants."""
    draft = next_draft(table, target, now_ms, whole_group=True)
    if plans.same_as(draft, plan) and not draft.cancel:
        kept = msgspec.structs.replace(plan, decision_id=target.decision_id)
        return msgspec.structs.replace(table, plan=kept)
    notes.append(Note("plan_superseded", f"plan {plan.plan_id} by target {target.decision_id}"))
    return plans.drop(table)


def fail(
    table: RoleTable,
    config: Config,
    now_ms: int,
    blamed: Sequence[WorkerId],
    reason: str,
    notes: list[Effect],
    *,
    late: bool = False,
) -> RoleTable:
    """Roll the plan in progress back, and say why. `late`: it missed its deadline."""
    assert table.plan is not None
    notes.append(Note("plan_failed", f"plan {table.plan.plan_id} is rolled back: {reason}", "warning"))
    return plans.roll_back(table, config, now_ms, blamed, reason, late=late)


def _expire(table: RoleTable, now_ms: int) -> RoleTable:
    """Waits that are over are marked so; the count of failures stays until the slot has joined."""
    writer = table.writer
    over = 0 < writer.hold_until_ms <= now_ms
    if not over and not any(0 < entry.until_ms <= now_ms for entry in writer.backoffs):
        return table
    backoffs = tuple(
        msgspec.structs.replace(entry, until_ms=0) if entry.until_ms <= now_ms else entry for entry in writer.backoffs
    )
    hold_until_ms = 0 if over else writer.hold_until_ms
    writer = msgspec.structs.replace(writer, backoffs=backoffs, hold_until_ms=hold_until_ms)
    return msgspec.structs.replace(table, writer=writer)


def _describe(plan: PlanRecord) -> str:
    return f"{len(plan.add)} join, {len(plan.remove)} leave, {len(plan.reassign)} change role"
