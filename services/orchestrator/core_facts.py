"""What executors, processes and node agents report, taken into the table. Pure.

Facts are taken by incarnation, plan id and generation, so that one which is stale, repeated or late changes nothing. Each
function returns the next table (the same object if the fact changes nothing) and adds to `notes` what is to be said.
"""

from __future__ import annotations

import msgspec

from messages.elastic_scheduler import NodeUp
from messages.envelope import brief, tag_of
from messages.ids import Activity, PolicyVersion, Residency, RoleGeneration, Stage, Zone
from messages.orchestrator import PlanProgress, RoleSet, WeightsApplied, WorkerGone, WorkerReady, WorkerReleased
from messages.pipeline_scheduler import WeightsPublished
from messages.subjects import node_of
from messages.toggle_manager import TrainerReady
from pearl_state.model import Move, RoleTable, Row, change, with_rows
from pearl_state.peers import Fact, wrong_fact, wrong_version, wrong_weights
from services.orchestrator import core_convergence as convergence
from services.orchestrator import core_lending as lending
from services.orchestrator import core_plans as plans
from services.orchestrator.config import Config
from services.runtime.core import Effect, Note, Refuse

LONGEST_ENDPOINT = 256
"""Characters of a worker's endpoint, which the table holds and everyone reads."""
RECLAIMED = "killed:reclaimed"
"""How the reason of a WorkerGone begins whose GPUs were taken away."""
LOST = "lost:"
"""How the reason begins when the orchestrator's own shell has missed a node's heartbeats."""
_REPORTS = ("pending", "prepared", "applied", "failed", "vetoed")


def on_progress(
    table: RoleTable, config: Config, now_ms: int, progress: PlanProgress, notes: list[Effect]
) -> RoleTable:
    """What an executor says of its part; of another plan than the table's it means nothing any more."""
    if progress.part not in ("rebuilder", "toggle") or progress.report not in _REPORTS:
        notes.append(Refuse(f"plan {progress.plan_id}: unknown part or report {progress.part}/{progress.report}"))
        return table
    plan = table.plan
    if plan is None or plan.plan_id != progress.plan_id:
        notes.append(Note("progress_stale", f"{progress.report} of plan {progress.plan_id}, which is over", "debug"))
        return table
    known = plan.rebuilder if progress.part == "rebuilder" else plan.toggle
    if known == "none":
        # Not refused: an executor that was restarted may report a part that a newer view of the plan no longer has.
        notes.append(Note("progress_stale", f"{progress.part} has no part in plan {plan.plan_id}", "debug"))
        return table
    if progress.report == "vetoed" and plan.stage == plans.APPLYING:
        # It crossed the cut epoch. The newer target that it heralds will undo what has to be undone.
        notes.append(Note("veto_late", f"plan {plan.plan_id} is vetoed after its cut epoch: it goes on", "debug"))
        return table
    if progress.report in ("failed", "vetoed"):
        reason = f"{progress.part} {progress.report}: {progress.reason or 'no reason given'}"
        # A veto blames nobody: the whole plan is cancelled, and planned anew after the hold.
        blamed = plans.suspects(table, progress.failed_workers) if progress.report == "failed" else ()
        return convergence.fail(table, config, now_ms, blamed, reason, notes)
    if progress.report == "applied" and plan.stage != plans.APPLYING:
        notes.append(Refuse(f"plan {plan.plan_id} is reported applied before its cut epoch"))
        return table
    if _REPORTS.index(progress.report) <= _REPORTS.index(known):
        return table
    plan = (
        msgspec.structs.replace(plan, rebuilder=progress.report)
        if progress.part == "rebuilder"
        else msgspec.structs.replace(plan, toggle=progress.report)
    )
    return msgspec.structs.replace(table, plan=plan)


def on_ready(table: RoleTable, fact: WorkerReady, notes: list[Effect]) -> RoleTable:
    """A joiner's process is up: its endpoint is known. It is prepared when it holds weights.

    An overlap worker's process is up long before it is lent GPUs.
    """
    row = current(table, fact, notes)
    if row is None:
        return table
    if len(fact.endpoint) > LONGEST_ENDPOINT:
        notes.append(Refuse(f"{row.worker} has an endpoint of {len(fact.endpoint)} characters"))
        return table
    ready = row.zone is Zone.OVERLAP
    if (row.activity is Activity.INACTIVE and not ready) or (row.endpoint, row.ready) == (fact.endpoint, ready):
        return table
    return with_rows(table, (msgspec.structs.replace(row, endpoint=fact.endpoint, ready=ready),))


def on_weights_applied(table: RoleTable, fact: WeightsApplied, notes: list[Effect]) -> RoleTable:
    """A worker generates with a version. It answers commands, hence a launching one is now prepared."""
    row = current(table, fact, notes)
    if row is None or row.activity is Activity.INACTIVE or fact.version <= row.version:
        return table
    if row.stage is Stage.LAUNCHING:
        pair = lending.pair_of(table, row.worker)
        if pair is not None and pair.residency is not Residency.ACTIVATING:
            # Delivered again: of an earlier borrow, whose process this is. It holds no weights now.
            return table
        row = change(row, Move.PREPARE)
    return with_rows(table, (msgspec.structs.replace(row, version=fact.version),))


def on_role_set(table: RoleTable, fact: RoleSet, notes: list[Effect]) -> RoleTable:
    """A worker serves the role that the plan gives it. Kept for a rollback; admission awaits the executors."""
    plan, done = table.plan, table.writer.role_set
    if current(table, fact, notes) is None or plan is None or plan.stage != plans.APPLYING or fact.worker in done:
        return table
    said = (fact.worker, fact.role, fact.incarnation, fact.role_generation)
    if said not in {(a.worker, a.role, a.incarnation, a.role_generation) for a in (*plan.add, *plan.reassign)}:
        return table
    row = table.row(fact.worker)
    if row is None or row.activity is Activity.INACTIVE:
        return table
    writer = msgspec.structs.replace(table.writer, role_set=tuple(sorted((*done, fact.worker))))
    return msgspec.structs.replace(table, writer=writer)


def on_gone(
    table: RoleTable,
    config: Config,
    now_ms: int,
    fact: WorkerGone,
    reason: str,
    notes: list[Effect],
) -> RoleTable:
    """A process is gone (or unreachable): its row serves no more, in this very epoch, whatever the plan."""
    row = current(table, fact, notes)
    if row is None:
        return table
    worker, incarnation = fact.worker, fact.incarnation
    if row.zone is Zone.TRAINING:
        notes.append(Note("trainer_gone", f"{worker} #{incarnation} is gone ({reason})", "warning"))
        if not reason.startswith(LOST):
            table = lending.trainer_gone(table)
        return with_rows(table, (change(row, Move.RESPAWN),))
    if row.zone is Zone.OVERLAP and not reason.startswith(LOST):
        table = lending.freed(table, row)
        if row.activity is Activity.INACTIVE:
            return with_rows(table, (change(row, Move.RESPAWN),))
    if row.activity is Activity.INACTIVE:
        return table
    level = "info" if row.stage is Stage.DRAINING else "warning"
    text = f"{worker} #{incarnation}, {row.activity}/{row.stage}, is gone ({reason})"
    notes.append(Note("worker_gone", text, level))
    lost = with_rows(table, (_lost(row, unreachable=reason.startswith(LOST)),))
    away = reason.startswith((RECLAIMED, LOST))
    if away:
        # Its GPUs are gone, or its node is silent: not to be counted on until a newer budget says so, or time passes.
        lost = plans.back_off(lost, config, now_ms, (worker,))
    plan = table.plan
    if plan is None or worker not in {assign.worker for assign in plan.add}:
        return lost
    if away and plan.stage == plans.PREPARING:
        return plans.drop(lost)  # planned again without it; the others are adopted
    blamed = () if away else (worker,)
    return convergence.fail(lost, config, now_ms, blamed, f"joiner {worker} is gone ({reason})", notes)


def on_released(table: RoleTable, fact: WorkerReleased, notes: list[Effect]) -> RoleTable:
    """An overlap worker gave its device memory back."""
    row = current(table, fact, notes)
    return table if row is None else lending.worker_released(table, row, fact)


def on_published(table: RoleTable, config: Config, published: WeightsPublished, notes: list[Effect]) -> RoleTable:
    """A newer policy version; joiners that are being admitted must hold it first."""
    if problem := wrong_weights(published, config.train_steps):
        notes.append(Refuse(problem))
        return table
    if published.version <= table.policy_version:
        return table
    return msgspec.structs.replace(table, policy_version=published.version)


def on_trainer_ready(table: RoleTable, config: Config, fact: TrainerReady, notes: list[Effect]) -> RoleTable:
    """The trainer is up at a version; informational."""
    if problem := wrong_version(fact.version, config.train_steps):
        notes.append(Refuse(problem))
        return table
    rows = [row for row in table.rows if row.zone is Zone.TRAINING and row.version < fact.version]
    return with_rows(table, (msgspec.structs.replace(row, version=fact.version) for row in rows))


def on_node_up(table: RoleTable, node: NodeUp) -> RoleTable:
    """A node agent has started: the node's slots may be tried again."""
    kept = tuple(entry for entry in table.writer.backoffs if node_of(entry.worker) != node.node)
    if len(kept) == len(table.writer.backoffs):
        return table
    return msgspec.structs.replace(table, writer=msgspec.structs.replace(table.writer, backoffs=kept))


def _lost(row: Row, *, unreachable: bool) -> Row:
    """A row whose process serves no more. One that is gone is wanted again, where processes are kept for lending.

    One that is only unreachable may live, and hold device memory: it is asked to let go, under a generation that was
    never announced to it, before its GPUs are training's again.
    """
    overlap = row.zone is Zone.OVERLAP
    if overlap and unreachable:
        return change(row, Move.LOSE, generation=RoleGeneration(row.role_generation + 3))
    row = change(row, Move.LOSE)
    return change(row, Move.RESPAWN) if overlap else row


def current(table: RoleTable, fact: Fact, notes: list[Effect]) -> Row | None:
    """The row that a fact is about, or None if the fact is stale (a note), senseless or of no slot (refused)."""
    row = table.row(fact.worker)
    if row is None:
        notes.append(Refuse(f"{tag_of(type(fact))} of {brief(fact.worker, 80)}, which is no slot of the role table"))
        return None
    # An event lost with a connection comes again later, so a version may be known before it was published here.
    problem = wrong_fact(table, PolicyVersion(table.policy_version + 1), fact)
    if problem and row.zone is not Zone.TRAINING:  # a trainer's incarnations are counted by its node agent
        notes.append(Refuse(problem))
        return None
    if row.incarnation != fact.incarnation:
        text = f"{tag_of(type(fact))} of {fact.worker} #{fact.incarnation}, which is #{row.incarnation} now"
        notes.append(Note("fact_stale", text, "debug"))
        return None
    return row
