"""A simulated run as people read it: one line for each thing that changes something, commands once however often repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from messages.agent import RequestInterrupted
from messages.decision_engine import BudgetChanged
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin, TrainingFinished
from messages.envelope import Message
from messages.ids import Activity, Role, Zone
from messages.monitor import DecisionRecord, GpusReturned
from messages.node_agent import Kill, Launch
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import BatchReady, StepFinished, WeightsPublished
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole, UpdateWeights
from messages.toggle_manager import TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import PlanRecord, RoleTable, Row
from services.simulator.faults.record import AttemptBegan, Seen, Sent, Stored, TableWritten


def transcript(record: Sequence[Seen], since: int, since_ms: int) -> str:
    """Lines of the record from its entry `since` on, times in seconds from `since_ms`."""
    lines: list[str] = []
    table: RoleTable | None = None
    told: set[str] = set()
    for place, seen in enumerate(record):
        if isinstance(seen, TableWritten):
            found = list(_table(table, seen.table))
            table = seen.table
            who = "table"
        else:
            found = [line for line in _lines(seen) if line not in told or not isinstance(seen, Sent)]
            who = "" if not isinstance(seen, Sent) else seen.sender
            if isinstance(seen, Sent):
                told.update(found)
        if place < since:
            continue
        at = f"{(seen.at_ms - since_ms) / 1000:7.2f}"
        lines += [f"{at}  {who or _sender(seen):18} {line}" for line in found]
    return "\n".join(lines) + "\n"


def story(text: str) -> set[str]:
    """What a transcript tells, without times, epochs, counters and requests: each move, command and report once."""
    told: set[str] = set()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        who, what = match[1].strip(), match[2]
        if who == "table":
            told.update(_NUMBER.sub("", part) for part in _SEPARATOR.split(what.partition(": ")[2]))
        elif what.startswith(("> ", "plan ", "GPUs ")):
            told.add(f"{who} {_NUMBER.sub('', what)}")
    return told


_LINE = re.compile(r" *[0-9.]+  (.{18}) (.*)")
_SEPARATOR = re.compile(r"; |, (?=\S+ (?:serves|launching|prepared|draining|switching|active|inactive))")
_NUMBER = re.compile(r"(?<=plan )p\d+|, -?\d+ ms before the deadline| to version \d+|(?<=batch )\S+| \(.*\)")
"""What moves with the time that things take: plan ids, spare time, versions, batches, reasons."""


def _sender(seen: Seen) -> str:
    match seen:
        case Stored(sender=sender):
            return sender or "preemption_feed"
        case AttemptBegan(worker=worker):
            return worker
        case _:
            return ""


def _lines(seen: Seen) -> Iterator[str]:
    match seen:
        case Stored(message=message):
            line = _event(message)
        case Sent(message=message):
            line = _command(message)
        case AttemptBegan(start=start) if start > 0 and seen.role is not Role.PREFILL:
            line = f"  goes on with {seen.request} attempt {seen.attempt} after {start} tokens"
        case _:
            line = ""
    if line:
        yield line


def _event(message: Message) -> str:
    match message:
        case GpuAvailable():
            return f"GPUs {list(message.gpus)} of {message.node} arrive"
        case GpuReclaimed():
            return f"GPUs {list(message.gpus)} of {message.node} are reclaimed, {message.notice_ms} ms notice"
        case BudgetChanged():
            overlap = f" and {_names(message.overlap)}" if message.overlap else ""
            return f"budget {message.budget_id}: {_names(message.dedicated)}{overlap} ({message.cause})"
        case TargetConfiguration():
            borrow = ", borrowing" if message.borrow else ""
            leaving = f"; leaving {_names(leave.worker for leave in message.leaving)}" if message.leaving else ""
            counts = f"{message.prefill}P {message.decode}D {message.colocated}C"
            return f"target {message.decision_id}: {counts}{borrow}{leaving}"
        case DecisionRecord():
            return f"decided {message.decision_id}: {message.reason}; {message.borrow_reason}"
        case TrainingBegin():
            return f"training wants its GPUs for batch {message.batch}"
        case TrainingFinished():
            return f"batch {message.batch} is trained, version {message.version} serves"
        case BatchReady():
            return f"batch {message.batch} is complete: {len(message.items)} trajectories"
        case StepFinished():
            return f"train step of batch {message.batch} is finished"
        case WeightsPublished():
            return f"weights of version {message.version} are published"
        case PlanProgress():
            return f"plan {message.plan_id}: {message.report}{f' ({message.reason})' if message.reason else ''}"
        case GpusReturned():
            spare = message.deadline_ms - message.at_ms
            return f"GPUs of {_names(message.workers)} are training's, {spare} ms before the deadline"
        case TrainerReleased():
            return "the trainer's memory is free"
        case TrainerResumed():
            return f"the trainer has its memory back, for batch {message.batch}"
        case RequestInterrupted():
            return f"{message.request} attempt {message.attempt}: {message.cause}, {message.received} tokens kept"
        case _:
            return _fact(message)


def _fact(message: Message) -> str:
    match message:
        case WorkerReady():
            return f"{message.worker} is up"
        case WeightsApplied():
            return f"{message.worker} has version {message.version}"
        case RoleSet():
            return f"{message.worker} takes role {message.role}"
        case WorkerDrained():
            return f"{message.worker} is drained, {message.interrupted} requests interrupted"
        case WorkerActivated():
            return f"{message.worker} has device memory"
        case WorkerReleased():
            return f"{message.worker} has released its device memory"
        case WorkerGone():
            return f"{message.worker} #{message.incarnation} is gone ({message.reason})"
        case _:
            return ""


def _command(message: Message) -> str:
    match message:
        case Launch() | Kill() | Drain() | SetRole() | Activate() | Deactivate() | UpdateWeights():
            verb = type(message).__name__
            detail = ""
            if isinstance(message, SetRole):
                detail = f" {message.role}"
            elif isinstance(message, UpdateWeights):
                detail = f" to version {message.version}"
            elif isinstance(message, Kill):
                detail = f" ({message.reason})"
            return f"> {verb} {message.worker} #{message.incarnation}{detail}"
        case TrainerRelease():
            return "> TrainerRelease"
        case TrainerResume():
            return f"> TrainerResume for batch {message.batch}"
        case _:
            return ""


def _table(old: RoleTable | None, new: RoleTable) -> Iterator[str]:
    changed = [_row(row) for row in new.rows if _differs(None if old is None else old.row(row.worker), row)]
    parts = [", ".join(changed)] if changed else []
    was, plan = (None if old is None else old.plan), new.plan
    if plan is not None and (was is None or (was.plan_id, was.stage) != (plan.plan_id, plan.stage)):
        parts.append(f"plan {plan.plan_id} {plan.stage}: {_plan(plan)}")
    elif was is not None and plan is None:
        failed = old is not None and new.writer.failed_plans > old.writer.failed_plans
        parts.append(f"plan {was.plan_id} {'is rolled back' if failed else 'is over'}")
    if old is not None:
        for pair, before in zip(new.pairs, old.pairs, strict=True):
            if pair.residency is not before.residency:
                parts.append(f"GPUs of {pair.overlap}: {pair.residency}")
        if new.training_batch != old.training_batch:
            parts.append(f"training batch {new.training_batch}")
    if new.admission_paused != (None if old is None else old.admission_paused):
        parts.append("admission pauses" if new.admission_paused else "admission goes on")
    if parts:
        yield f"epoch {new.epoch}: {'; '.join(parts)}"


def _differs(old: Row | None, new: Row) -> bool:
    if old is None:
        return new.activity is not Activity.INACTIVE
    return (old.activity, old.stage, old.role) != (new.activity, new.stage, new.role)


def _row(row: Row) -> str:
    if row.activity is Activity.TRANSITIONING:
        return f"{row.worker} {row.stage}"
    if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING:
        return f"{row.worker} serves as {row.role}"
    return f"{row.worker} {row.activity}"


def _plan(plan: PlanRecord) -> str:
    parts = []
    if plan.add:
        parts.append("add " + ", ".join(f"{entry.worker} as {entry.role}" for entry in plan.add))
    if plan.remove:
        parts.append("remove " + _names(entry.worker for entry in plan.remove))
    if plan.reassign:
        parts.append("reassign " + ", ".join(f"{entry.worker} to {entry.role}" for entry in plan.reassign))
    return "; ".join(parts)


def _names(workers: Iterable[str]) -> str:
    return ", ".join(workers) or "nobody"
