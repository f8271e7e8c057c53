"""The orchestrator's core: its state is the role table, its output the next table and the plan in it (paper 4.4).

It converges: each input is first taken into the table, then the table is compared with the target and moved as far
towards it as is legal now. A step that changes anything raises the epoch by one, however much it changes. Facts are
taken by incarnation, plan id and generation, so that one which is stale, repeated or late changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.elastic_scheduler import NodeUp
from messages.envelope import Message, brief, tag_of
from messages.ids import (
    Activity,
    Epoch,
    Gpu,
    Incarnation,
    Mode,
    PolicyVersion,
    Residency,
    Role,
    RoleGeneration,
    Stage,
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
from messages.subjects import node_of
from messages.toggle_manager import TrainerReady, TrainerReleased
from pearl_state.invariants import check
from pearl_state.model import Move, Pair, PlanRecord, RoleTable, Row, change, with_rows
from pearl_state.peers import Fact, wrong_budget, wrong_fact, wrong_version, wrong_weights
from pearl_state.plan import changes_of, first_wave
from services.orchestrator import core_lending as lending
from services.orchestrator import core_plans as plans
from services.orchestrator.config import Config
from services.orchestrator.core_planning import counts_of, next_draft
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick

MOST_ROUNDS = 12
"""Bound of moves in one step (drop, draft, cut, roll back, draft anew ...); more would be a loop."""
LONGEST_ENDPOINT = 256
"""Characters of a worker's endpoint, which the table holds and everyone reads."""
RECLAIMED = "killed:reclaimed"
"""How the reason of a WorkerGone begins whose GPUs were taken away."""
LOST = "lost:"
"""How the reason begins when the orchestrator's own shell has missed a node's heartbeats."""


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
        if table is not before or _due(table, now_ms):
            # A table that was converged and has not changed is converged.
            table = self._converge(table, now_ms, notes)
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
                pass  # see _due
            case TargetConfiguration() as target:
                table = self.on_target(table, event, target, notes)
            case PlanProgress() as progress:
                table = self.on_progress(table, event, progress, notes)
            case WorkerReady() as fact:
                table = self.on_ready(table, fact, notes)
            case WeightsApplied() as fact:
                table = self.on_weights_applied(table, fact, notes)
            case RoleSet() as fact:
                table = self.on_role_set(table, fact, notes)
            case WorkerDrained() as fact:
                # The rebuilder's business, the row says "draining" until it reports; but who names no slot is told here.
                _current(table, fact, notes)
            case WorkerReleased() as fact:
                table = self.on_released(table, fact, notes)
            case TrainerReleased() as fact:
                table = lending.trainer_released(table, fact)
            case WorkerGone() as fact:
                table = self.on_gone(table, event, fact, fact.reason, notes)
            case WorkerLost() as fact:
                gone = WorkerGone(worker=fact.worker, incarnation=fact.incarnation, reason=fact.reason)
                table = self.on_gone(table, event, gone, f"{LOST} {fact.reason}", notes)
            case WeightsPublished() as published:
                table = self.on_published(table, published, notes)
            case TrainerReady() as fact:
                table = self.on_trainer_ready(table, fact, notes)
            case NodeUp() as node:
                table = self.on_node_up(table, node)
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

    def on_progress(self, table: RoleTable, event: Input, progress: PlanProgress, notes: list[Effect]) -> RoleTable:
        """What an executor says of its part; of another plan than the table's it means nothing any more."""
        if progress.part not in ("rebuilder", "toggle") or progress.report not in _REPORTS:
            notes.append(Refuse(f"plan {progress.plan_id}: unknown part or report {progress.part}/{progress.report}"))
            return table
        plan = table.plan
        if plan is None or plan.plan_id != progress.plan_id:
            notes.append(
                Note("progress_stale", f"{progress.report} of plan {progress.plan_id}, which is over", "debug")
            )
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
            return self._fail(table, event.now_ms, blamed, reason, notes)
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

    def on_ready(self, table: RoleTable, fact: WorkerReady, notes: list[Effect]) -> RoleTable:
        """A joiner's process is up: its endpoint is known. It is prepared when it holds weights.

        An overlap worker's process is up long before it is lent GPUs.
        """
        row = _current(table, fact, notes)
        if row is None:
            return table
        if len(fact.endpoint) > LONGEST_ENDPOINT:
            notes.append(Refuse(f"{row.worker} has an endpoint of {len(fact.endpoint)} characters"))
            return table
        ready = row.zone is Zone.OVERLAP
        if (row.activity is Activity.INACTIVE and not ready) or (row.endpoint, row.ready) == (fact.endpoint, ready):
            return table
        return with_rows(table, (msgspec.structs.replace(row, endpoint=fact.endpoint, ready=ready),))

    def on_weights_applied(self, table: RoleTable, fact: WeightsApplied, notes: list[Effect]) -> RoleTable:
        """A worker generates with a version. It answers commands, hence a launching one is now prepared."""
        row = _current(table, fact, notes)
        if row is None or row.activity is Activity.INACTIVE or fact.version <= row.version:
            return table
        if row.stage is Stage.LAUNCHING:
            pair = lending.pair_of(table, row.worker)
            if pair is not None and pair.residency is not Residency.ACTIVATING:
                # Delivered again: of an earlier borrow, whose process this is. It holds no weights now.
                return table
            row = change(row, Move.PREPARE)
        return with_rows(table, (msgspec.structs.replace(row, version=fact.version),))

    def on_role_set(self, table: RoleTable, fact: RoleSet, notes: list[Effect]) -> RoleTable:
        """A worker serves the role that the plan gives it. Kept for a rollback; admission awaits the executors."""
        plan, done = table.plan, table.writer.role_set
        if _current(table, fact, notes) is None or plan is None or plan.stage != plans.APPLYING or fact.worker in done:
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
        self,
        table: RoleTable,
        event: Input,
        fact: WorkerGone,
        reason: str,
        notes: list[Effect],
    ) -> RoleTable:
        """A process is gone (or unreachable): its row serves no more, in this very epoch, whatever the plan."""
        row = _current(table, fact, notes)
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
            lost = plans.back_off(lost, self.config, event.now_ms, (worker,))
        plan = table.plan
        if plan is None or worker not in {assign.worker for assign in plan.add}:
            return lost
        if away and plan.stage == plans.PREPARING:
            return plans.drop(lost)  # planned again without it; the others are adopted
        blamed = () if away else (worker,)
        return self._fail(lost, event.now_ms, blamed, f"joiner {worker} is gone ({reason})", notes)

    def on_released(self, table: RoleTable, fact: WorkerReleased, notes: list[Effect]) -> RoleTable:
        """An overlap worker gave its device memory back."""
        row = _current(table, fact, notes)
        return table if row is None else lending.worker_released(table, row, fact)

    def on_published(self, table: RoleTable, published: WeightsPublished, notes: list[Effect]) -> RoleTable:
        """A newer policy version; joiners that are being admitted must hold it first."""
        if problem := wrong_weights(published, self.config.train_steps):
            notes.append(Refuse(problem))
            return table
        if published.version <= table.policy_version:
            return table
        return msgspec.structs.replace(table, policy_version=published.version)

    def on_trainer_ready(self, table: RoleTable, fact: TrainerReady, notes: list[Effect]) -> RoleTable:
        """The trainer is up at a version; informational."""
        if problem := wrong_version(fact.version, self.config.train_steps):
            notes.append(Refuse(problem))
            return table
        rows = [row for row in table.rows if row.zone is Zone.TRAINING and row.version < fact.version]
        return with_rows(table, (msgspec.structs.replace(row, version=fact.version) for row in rows))

    def on_node_up(self, table: RoleTable, node: NodeUp) -> RoleTable:
        """A node agent has started: the node's slots may be tried again."""
        kept = tuple(entry for entry in table.writer.backoffs if node_of(entry.worker) != node.node)
        if len(kept) == len(table.writer.backoffs):
            return table
        return msgspec.structs.replace(table, writer=msgspec.structs.replace(table.writer, backoffs=kept))

    # Convergence

    def _converge(self, table: RoleTable, now_ms: int, notes: list[Effect]) -> RoleTable:
        """Move the table towards its target as far as it can go now."""
        table = _expire(table, now_ms)
        for _ in range(MOST_ROUNDS):
            before = table
            table = self._hand_over(table, now_ms, notes)
            table = self._advance(table, now_ms, notes)
            table = lending.settle(table, self.config, now_ms)
            if table is before:
                return table
        raise AssertionError(f"no fixed point after {MOST_ROUNDS} rounds; plan {table.plan}")

    def _hand_over(self, table: RoleTable, now_ms: int, notes: list[Effect]) -> RoleTable:
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

    def _advance(self, table: RoleTable, now_ms: int, notes: list[Effect]) -> RoleTable:
        """One move of the plan in progress, or the next plan."""
        target, plan = table.writer.target, table.plan
        if target is None:
            return table
        if plan is None:
            return self._plan_next(table, target, now_ms, notes)
        if plan.stage == plans.APPLYING:
            cut = lending.cut_returns(table, target)
            if cut is not table:
                notes.append(Note("plan_cut_short", f"plan {plan.plan_id} goes on without training's GPUs"))
                return cut
            table = self._advance_applying(table, plan, notes)
        else:
            table = self._advance_preparing(table, plan, target, now_ms, notes)
        # What has been reported counts, even if it is read late (this process may have been away): the deadline is last.
        if table.plan is plan and now_ms >= plan.deadline_ms:
            reason = f"not {'applied' if plan.stage == plans.APPLYING else 'prepared'} by its deadline"
            return self._fail(table, now_ms, plans.suspects(table), reason, notes, late=True)
        return table

    def _advance_applying(self, table: RoleTable, plan: PlanRecord, notes: list[Effect]) -> RoleTable:
        if not plans.may_admit(table):
            return table
        notes.append(Note("plan_admitted", f"plan {plan.plan_id}: {_describe(plan)}"))
        return plans.admit(table)

    def _advance_preparing(
        self, table: RoleTable, plan: PlanRecord, target: TargetConfiguration, now_ms: int, notes: list[Effect]
    ) -> RoleTable:
        if not plans.coherent(table):
            notes.append(Note("plan_dropped", f"plan {plan.plan_id}: a worker that it was to change is gone"))
            return plans.drop(table)
        if plan.decision_id != target.decision_id:
            return self._supersede(table, plan, target, now_ms, notes)
        urgent = next_draft(table, target, now_ms, whole_group=True)
        if not urgent.plan.empty and not urgent.plan.add:
            notes.append(Note("plan_dropped", f"plan {plan.plan_id}: survivors must change roles first"))
            return plans.drop(table)
        ready = plan.rebuilder in ("prepared", "none") and plan.toggle in ("prepared", "none")
        rows = table.by_worker
        if ready and all(rows[assign.worker].stage is Stage.PREPARED for assign in plan.add):
            changes = changes_of(plan)
            if first_wave(table.rows, changes, {leave.worker for leave in target.leaving}) != changes:
                notes.append(
                    Note("plan_dropped", f"plan {plan.plan_id}: those who were to serve on meanwhile are gone")
                )
                return plans.drop(table)
            return plans.cut(table, self.config, now_ms)
        return table

    def _plan_next(self, table: RoleTable, target: TargetConfiguration, now_ms: int, notes: list[Effect]) -> RoleTable:
        draft = next_draft(table, target, now_ms)
        if draft.plan.empty and not draft.cancel:
            return table
        table = plans.start(table, target, draft, self.config, now_ms)
        if table.plan is not None:
            why = f"; {draft.fallback}" if draft.fallback else ""
            what = f"plan {table.plan.plan_id} for {target.decision_id}: {_describe(table.plan)}{why}"
            notes.append(Note("plan", what))
        return table

    def _supersede(
        self, table: RoleTable, plan: PlanRecord, target: TargetConfiguration, now_ms: int, notes: list[Effect]
    ) -> RoleTable:
        """A newer target while the plan is preparing: keep it where it still is what the target wants."""
        draft = next_draft(table, target, now_ms, whole_group=True)
        if plans.same_as(draft, plan) and not draft.cancel:
            kept = msgspec.structs.replace(plan, decision_id=target.decision_id)
            return msgspec.structs.replace(table, plan=kept)
        notes.append(Note("plan_superseded", f"plan {plan.plan_id} by target {target.decision_id}"))
        return plans.drop(table)

    def _fail(
        self,
        table: RoleTable,
        now_ms: int,
        blamed: Sequence[WorkerId],
        reason: str,
        notes: list[Effect],
        *,
        late: bool = False,
    ) -> RoleTable:
        assert table.plan is not None
        notes.append(Note("plan_failed", f"plan {table.plan.plan_id} is rolled back: {reason}", "warning"))
        return plans.roll_back(table, self.config, now_ms, blamed, reason, late=late)


_REPORTS = ("pending", "prepared", "applied", "failed", "vetoed")


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


def _current(table: RoleTable, fact: Fact, notes: list[Effect]) -> Row | None:
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


def _due(table: RoleTable, now_ms: int) -> bool:
    """Whether time alone changes anything: a deadline, or a wait that ends."""
    writer = table.writer
    return (
        (table.plan is not None and now_ms >= table.plan.deadline_ms)
        or 0 < writer.hold_until_ms <= now_ms
        or any(0 < entry.until_ms <= now_ms for entry in writer.backoffs)
    )


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
