"""The orchestrator's core: its state is the role table, its output the next table and the plan in it (paper 4.4).

It converges: each input is first taken into the table, then the table is compared with the target and moved as far
towards it as is legal now. A step that changes anything raises the epoch by one, however much it changes.

Here are the slots, the targets, and what makes an epoch of a batch of inputs. What is reported is taken in
`core_facts.py`; `core_convergence.py` moves the table, by what a plan does to it (`core_plans.py`), what is planned next
(`core_planning.py`) and the lending of training's GPUs (`core_lending.py`). `core_rebuild.py` makes a table that was lost anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.elastic_scheduler import NodeUp
from messages.envelope import Message
from messages.ids import (
    Epoch,
    Gpu,
    Incarnation,
    Mode,
    Role,
    WorkerId,
    Zone,
)
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    TargetConfiguration,
    WeightsApplied,
    WorkerDrained,
    WorkerGone,
    WorkerLost,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import WeightsPublished
from messages.toggle_manager import TrainerReady, TrainerReleased
from pearl_state.invariants import check
from pearl_state.model import Move, Pair, RoleTable, Row, change
from pearl_state.peers import wrong_budget
from services.orchestrator import core_convergence as convergence
from services.orchestrator import core_facts as facts
from services.orchestrator import core_lending as lending
from services.orchestrator import core_plans as plans
from services.orchestrator.config import Config
from services.orchestrator.core_planning import counts_of
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick


class OrchestratorCore:
    """`step` of the orchestrator. `step_all` takes a batch of inputs into one epoch."""

    name = "orchestrator"
    inputs: tuple[type[Message], ...] = (
        TargetConfiguration,
        PlanProgress,
        WorkerReady,
        WeightsApplied,
        RoleSet,
        WorkerDrained,
        WorkerReleased,
        WorkerGone,
        WeightsPublished,
        TrainerReleased,
        TrainerReady,
        NodeUp,
    )
    state_type = RoleTable

    def __init__(self, config: Config) -> None:
        self.config = config

    def initial(self) -> RoleTable:
        """The table of a job that has never run: every slot inactive, training device state on the training GPUs."""
        return self.with_slots(RoleTable(job=self.config.job, epoch=Epoch(0), rows=()))

    def with_slots(self, table: RoleTable) -> RoleTable:
        """The table with a row for every slot of the job file that has none yet, and the pairs that go with them.

        Slots are stable: one that the job file no longer has stays (no target will name it), and one whose GPUs or
        zone changed is an error (ValueError).
        """
        rows = table.by_worker
        for slot in self.config.slots:
            row = rows.get(slot.worker)
            if row is not None and (row.gpus, row.zone) != (slot.gpus, slot.zone):
                raise ValueError(
                    f"slot {slot.worker} has GPUs or a zone other than in the role table of job {table.job}: a slot "
                    "keeps both for the life of a job; name the node differently or start a job of another name"
                )
            if row is None:
                row = rows[slot.worker] = _new_row(slot.worker, slot.gpus, slot.zone)
            if self.config.lending and row.zone is Zone.OVERLAP and row.incarnation == 0:
                rows[slot.worker] = change(row, Move.RESPAWN)
        pairs = {pair.overlap: pair for pair in table.pairs}
        trainers = {row.gpus[0].node: row.worker for row in rows.values() if row.zone is Zone.TRAINING}
        for row in rows.values():
            if row.zone is Zone.OVERLAP and row.worker not in pairs:
                pairs[row.worker] = Pair(overlap=row.worker, training=trainers[row.gpus[0].node])
        ordered = tuple(rows[worker] for worker in sorted(rows))
        paired = tuple(pairs[worker] for worker in sorted(pairs))
        if (ordered, paired) == (table.rows, table.pairs):
            return table
        return msgspec.structs.replace(table, rows=ordered, pairs=paired)

    def step(self, state: RoleTable, event: Input) -> tuple[RoleTable, Effects]:
        """One input, one epoch at most."""
        table, each, after = self.step_all(state, (event,))
        return table, (*each[0], *after)

    def step_all(self, table: RoleTable, events: Sequence[Input]) -> tuple[RoleTable, tuple[Effects, ...], Effects]:
        """A batch of inputs in order, in one epoch: (the next table, effects of each input, effects of the epoch).

        The table is the same object if nothing changed. The epoch's effects must follow its write.
        """
        before = table
        each: list[Effects] = []
        for event in events:
            table, effects = self._take(table, event)
            each.append(effects)
        now_ms = max([before.written_ms, *(event.now_ms for event in events)])
        notes: list[Effect] = []
        if table is not before or convergence.due(table, now_ms):
            # A table that was converged and has not changed is converged.
            table = convergence.converge(table, self.config, now_ms, notes)
        if table is before or table == before:
            return before, tuple(each), tuple(notes)
        last = max((event.seq for event in events), default=0)
        writer = msgspec.structs.replace(table.writer, cursor=max(table.writer.cursor, last))
        epoch = Epoch(before.epoch + 1)
        table = msgspec.structs.replace(table, epoch=epoch, writer=writer, written_ms=now_ms)
        check(before, table)
        return table, tuple(each), (*notes, *self._publish(before, table))

    def _publish(self, before: RoleTable, table: RoleTable) -> Effects:
        """The plan, where it or its stage is new."""
        plan, was = table.plan, before.plan
        if plan is None or (was is not None and (was.plan_id, was.stage) == (plan.plan_id, plan.stage)):
            return ()
        return (Send(plans.plan_message(table)),)

    def _take(self, table: RoleTable, event: Input) -> tuple[RoleTable, Effects]:
        notes: list[Effect] = []
        match event.message:
            case Tick():
                pass  # see convergence.due
            case TargetConfiguration() as target:
                table = self.on_target(table, event, target, notes)
            case PlanProgress() as progress:
                table = facts.on_progress(table, self.config, event.now_ms, progress, notes)
            case WorkerReady() as fact:
                table = facts.on_ready(table, fact, notes)
            case WeightsApplied() as fact:
                table = facts.on_weights_applied(table, fact, notes)
            case RoleSet() as fact:
                table = facts.on_role_set(table, fact, notes)
            case WorkerDrained() as fact:
                # The rebuilder's business, the row says "draining" until it reports; but who names no slot is told here.
                facts.current(table, fact, notes)
            case WorkerReleased() as fact:
                table = facts.on_released(table, fact, notes)
            case TrainerReleased() as fact:
                table = lending.trainer_released(table, fact)
            case WorkerGone() as fact:
                table = facts.on_gone(table, self.config, event.now_ms, fact, fact.reason, notes)
            case WorkerLost() as fact:
                gone = WorkerGone(worker=fact.worker, incarnation=fact.incarnation, reason=fact.reason)
                table = facts.on_gone(table, self.config, event.now_ms, gone, f"{facts.LOST} {fact.reason}", notes)
            case WeightsPublished() as published:
                table = facts.on_published(table, self.config, published, notes)
            case TrainerReady() as fact:
                table = facts.on_trainer_ready(table, self.config, fact, notes)
            case NodeUp() as node:
                table = facts.on_node_up(table, node)
            case other:
                notes.append(Refuse(f"{type(other).__name__} is no input of the orchestrator"))
        return table, tuple(notes)

    # Inputs

    def on_target(self, table: RoleTable, event: Input, target: TargetConfiguration, notes: list[Effect]) -> RoleTable:
        """A newer target replaces the older one whole; a slot that was not usable before may be tried anew."""
        writer = table.writer
        old = writer.target
        if old is not None and (
            target.decision_id == old.decision_id
            or (event.seq and event.seq <= writer.target_seq)
            or target.budget_id < old.budget_id
        ):
            notes.append(
                Note("target_stale", f"target {target.decision_id} is not newer than {old.decision_id}", "debug")
            )
            return table
        problem = self._senseless(table, target) or wrong_budget(
            target.budget_id, None if old is None else old.budget_id
        )
        if problem:
            notes.append(Refuse(f"target {target.decision_id}: {problem}"))
            return table
        usable = frozenset(target.usable)
        writer = msgspec.structs.replace(
            writer,
            target=target,
            target_seq=max(writer.target_seq, event.seq),
            backoffs=tuple(entry for entry in writer.backoffs if entry.worker in usable),
            hold_until_ms=0,
        )
        return msgspec.structs.replace(table, writer=writer)

    def _senseless(self, table: RoleTable, target: TargetConfiguration) -> str:
        """Why the target cannot be meant, or ""."""
        counts, rows = counts_of(target), table.by_worker
        if min(counts.prefill, counts.decode, counts.colocated) < 0:
            return "a role count is negative"
        if target.mode is Mode.UNKNOWN:
            return "unknown mode"
        named = (*target.usable, *(leave.worker for leave in target.leaving))
        unknown = sorted({worker for worker in named if worker not in rows})
        if unknown:
            return f"no slot {', '.join(unknown)} in the role table"
        if len(set(target.usable)) != len(target.usable):
            return "usable lists a slot twice"
        if counts.total > len(target.usable):
            return f"{counts.total} roles for {len(target.usable)} usable slots"
        if target.training_batch is not None and target.training_batch < 0:
            return f"training batch {target.training_batch} is negative"
        trainers = sorted(worker for worker in target.usable if rows[worker].zone is Zone.TRAINING)
        if trainers:
            return f"{', '.join(trainers)}: rollout uses a training GPU through its overlap slot only"
        lent = sorted(worker for worker in target.usable if rows[worker].zone is Zone.OVERLAP)
        if lent and target.training_batch is not None:
            return f"{', '.join(lent)}: not usable while training has, or wants, its GPUs"
        return ""


def _new_row(worker: WorkerId, gpus: tuple[Gpu, ...], zone: Zone) -> Row:
    """A slot that has never had a process. The trainer's first process is incarnation 1: it is wanted from the start."""
    trains = zone is Zone.TRAINING
    return Row(
        worker=worker,
        gpus=gpus,
        zone=zone,
        role=Role.TRAINING if trains else Role.COLOCATED,
        incarnation=Incarnation(1 if trains else 0),
    )
