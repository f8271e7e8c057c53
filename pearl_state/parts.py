"""An executor's part of a plan: which of the plan's workers are its own, and what it has reported of them.

Pure. The cluster rebuilder and the toggle manager share it: they differ in whose workers they take and in what a worker has to
do, not in what a part is, when its role changes are done, or how a failure is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from messages.decision_engine import Leave
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import PlanId, WorkerId
from messages.orchestrator import PlanProgress
from messages.subjects import node_of
from pearl_state.model import PlanRecord, RoleTable, Row
from pearl_state.progress import Mark, Progress, has_left


class Part(NamedTuple):
    """One executor's share of a plan."""

    plan_id: PlanId
    applying: bool
    add: tuple[Assign, ...]
    remove: tuple[Leave, ...]
    reassign: tuple[Assign, ...]


def part_of(plan: PlanRecord | None, workers: Collection[WorkerId]) -> Part | None:
    """The share of the executor that these workers belong to, or None if it has none."""
    if plan is None:
        return None
    add = tuple(entry for entry in plan.add if entry.worker in workers)
    remove = tuple(entry for entry in plan.remove if entry.worker in workers)
    reassign = tuple(entry for entry in plan.reassign if entry.worker in workers)
    if not (add or remove or reassign):
        return None
    return Part(plan.plan_id, plan.stage == "applying", add, remove, reassign)


def part_for(part: Part, worker: WorkerId) -> Part:
    """What the part asks of one worker; empty if nothing."""
    return part._replace(
        add=tuple(entry for entry in part.add if entry.worker == worker),
        remove=tuple(entry for entry in part.remove if entry.worker == worker),
        reassign=tuple(entry for entry in part.reassign if entry.worker == worker),
    )


def misplaced(plan: ReconfigurationPlan, nodes: Collection[str]) -> str:
    """Why a plan's message is none for this job: it names workers of nodes that the job does not have. "" if it is."""
    named = (entry.worker for entry in (*plan.add, *plan.remove, *plan.reassign))
    unknown = sorted(worker for worker in named if node_of(worker) not in nodes)
    return f"plan {plan.plan_id} names {', '.join(unknown)}, whose node is not in the job file" if unknown else ""


def kept_marks(marks: Iterable[Mark], table: RoleTable) -> tuple[Mark, ...]:
    """The marks that are of the plan in the table."""
    return tuple(mark for mark in marks if table.plan is not None and mark.plan_id == table.plan.plan_id)


def marked(marks: Iterable[Mark], part: Part, report: str) -> bool:
    """Whether this was marked of the part's plan before."""
    return any(mark.plan_id == part.plan_id and mark.report == report for mark in marks)


def failure(part: Part, executor: str, failed: Sequence[tuple[WorkerId, str]]) -> PlanProgress:
    """What an executor ("rebuilder" | "toggle") says of joiners that failed, each with why."""
    return PlanProgress(
        plan_id=part.plan_id,
        part=executor,
        report="failed",
        failed_workers=tuple(worker for worker, _ in failed),
        reason="; ".join(f"{worker}: {why}" for worker, why in failed),
    )


def roles_are_set(part: Part, rows: Mapping[WorkerId, Row], known: Mapping[WorkerId, Progress]) -> bool:
    """Every joiner and role-changer serves under the generation it will be admitted with; a role-changer that left counts."""

    def is_set(entry: Assign) -> bool:
        progress = known.get(entry.worker)
        return (
            progress is not None
            and progress.incarnation == entry.incarnation
            and progress.role_set >= entry.role_generation
        )

    def is_gone(entry: Assign) -> bool:
        row = rows.get(entry.worker)
        return row is None or has_left(row, known.get(entry.worker))

    return all(map(is_set, part.add)) and all(is_set(entry) or is_gone(entry) for entry in part.reassign)
