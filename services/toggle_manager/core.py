"""Toggle manager core (paper 4.6): makes the overlap zone's device state agree with the role table.

Processes live on; only device state moves. As with the cluster rebuilder, all that it wants follows from the table.

- Training: while the table says that training owns its GPUs for batch k, and no overlap worker holds device memory,
  the trainer is told to train k until the step is finished.
- Borrow (a plan adds overlap workers): TrainerRelease -> TrainerReleased -> (Launch, the first time) -> Activate ->
  WorkerActivated -> newest weights -> "prepared"; after the cut epoch SetRole -> "applied".
- Return (a plan removes them): Drain -> WorkerDrained -> Deactivate -> WorkerReleased -> "applied". A worker that
  does not answer in time is killed: its process's end gives the GPUs back as well.
- A borrow half done that the table no longer wants is undone: an inactive overlap worker holds no device memory.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from messages.decision_engine import Leave
from messages.elastic_scheduler import NodeUp
from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Activity, Epoch, Incarnation, PlanId, Residency, RoleGeneration, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import (
    PlanProgress,
    RoleSet,
    WeightsApplied,
    WorkerActivated,
    WorkerDrained,
    WorkerGone,
    WorkerReady,
    WorkerReleased,
)
from messages.pipeline_scheduler import StepFinished, WeightsPublished
from messages.rollout_worker import Activate, Deactivate
from messages.runtime_tracker import OperationTimed
from messages.subjects import node_of
from messages.toggle_manager import TrainerReady, TrainerReleased
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import PlanRecord, RoleTable, Row
from pearl_state.orders import (
    Order,
    Repeat,
    answered,
    drain_order,
    given_up,
    kill_key,
    kill_order,
    launch_order,
    repeat,
    role_order,
    update_order,
)
from pearl_state.peers import wrong_batch, wrong_fact, wrong_weights
from pearl_state.progress import Fact, Mark, Progress, has_left, is_drained, launched, learn, remember, slim
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick
from services.toggle_manager.config import Config

PART = "toggle"
COST_WEIGHT = 0.3
"""Weight of the newest sample in the moving averages (paper 5): about the last five hand-overs count."""


class ToggleCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Learned costs in seconds, exponential moving averages; None: no sample yet."""

    borrow_s: float | None = None  # first TrainerRelease until the group is prepared
    return_s: float | None = None  # cut epoch until all GPUs are back
    toggled_step_s: float | None = None  # from one finished train step to the next, with a borrow between them
    plain_step_s: float | None = None  # the same without one


class ToggleState(msgspec.Struct, frozen=True, kw_only=True):
    """The table as last seen, what is known of each process and of the trainer, and the commands that await an answer."""

    clock_ms: int = 0
    table: RoleTable | None = None
    snapshot: WeightsPublished | None = None  # the newest
    workers: tuple[Progress, ...] = ()
    pending: tuple[Repeat, ...] = ()
    marks: tuple[Mark, ...] = ()  # of the plan in the table
    finished_batch: int = -1  # the newest batch trained
    resume_batch: int = -1  # the batch the trainer was last told to train, and as of which epoch
    resume_epoch: Epoch = Epoch(0)
    trainer_incarnation: Incarnation = Incarnation(1)
    trainer_resident: bool = True  # the trainer's device state may be on its GPUs
    release_epoch: Epoch = Epoch(0)  # names the last release asked for
    release_wanted: bool = False  # that release is under way
    costs: ToggleCosts = ToggleCosts()
    last_step_ms: int = 0
    toggled: bool = False  # GPUs were lent since the last finished step


class Part(NamedTuple):
    """This executor's share of a plan: its workers of the overlap zone."""

    plan_id: PlanId
    applying: bool
    add: tuple[Assign, ...]
    remove: tuple[Leave, ...]
    reassign: tuple[Assign, ...]


class View(NamedTuple):
    """The state, indexed, for one convergence."""

    state: ToggleState
    table: RoleTable
    now_ms: int
    rows: dict[WorkerId, Row]
    known: dict[WorkerId, Progress]


class ToggleManagerCore:
    """`step` of the toggle manager."""

    name = "toggle_manager"
    inputs: tuple[type[Message], ...] = (
        ReconfigurationPlan,
        NodeUp,
        WorkerReady,
        WeightsApplied,
        WorkerDrained,
        RoleSet,
        WorkerActivated,
        WorkerReleased,
        WorkerGone,
        WeightsPublished,
        TrainerReleased,
        TrainerReady,
        StepFinished,
    )
    state_type = ToggleState

    def __init__(self, config: Config) -> None:
        self.config = config
        self._slots = {slot.worker: slot for slot in config.slots}

    def initial(self) -> ToggleState:
        return ToggleState()

    def step(self, state: ToggleState, event: Input) -> tuple[ToggleState, Effects]:
        before = state
        # A durable input carries the time the stream took it, which after an outage is long past.
        state = msgspec.structs.replace(state, clock_ms=max(state.clock_ms, event.now_ms))
        effects: Effects = ()
        match event.message:
            case Tick():
                pass
            case RoleTable() as table:
                state = self.on_table(state, table)
            case ReconfigurationPlan() as plan:
                effects = self.on_plan(plan)
            case NodeUp() as node:
                state = self.on_node_up(state, node)
            case WeightsPublished() as snapshot:
                if problem := wrong_weights(snapshot, self.config.train_steps):
                    effects = (Refuse(problem),)
                elif state.snapshot is None or snapshot.version > state.snapshot.version:
                    state = msgspec.structs.replace(state, snapshot=snapshot)
            case TrainerReleased() as released:
                state = self.on_trainer_released(state, released)
            case TrainerReady():
                state = self.on_trainer_ready(state)
            case StepFinished() as finished:
                state, effects = self.on_step_finished(state, finished)
            case (
                WorkerReady()
                | WeightsApplied()
                | WorkerDrained()
                | RoleSet()
                | WorkerActivated()
                | WorkerReleased()
                | WorkerGone()
            ) as fact:
                state, effects = self.on_fact(state, fact)
            case other:
                effects = (Refuse(f"{type(other).__name__} is no input of the toggle manager"),)
        if any(isinstance(effect, Refuse) for effect in effects):
            return before, effects
        state, more = self._converge(state)
        return state, effects + more

    # Events

    def on_table(self, state: ToggleState, table: RoleTable) -> ToggleState:
        if state.table is not None and table.epoch <= state.table.epoch:
            return state
        marks = tuple(mark for mark in state.marks if table.plan is not None and mark.plan_id == table.plan.plan_id)
        mine = slim(table, (row for row in table.rows if row.worker in self._slots))
        state = msgspec.structs.replace(state, table=mine, marks=marks)
        part = self._part(mine.plan)
        if part is not None:
            stage = "applying" if part.applying else "preparing"
            if not _marked(state, part, stage):
                state = _mark(state, part, stage)
        return state

    def on_plan(self, plan: ReconfigurationPlan) -> Effects:
        """The table is the order; this message only says that there is one."""
        named = [entry.worker for entry in (*plan.add, *plan.remove, *plan.reassign)]
        unknown = sorted(worker for worker in named if node_of(worker) not in self.config.nodes)
        if unknown:
            return (Refuse(f"plan {plan.plan_id} names {', '.join(unknown)}, whose node is not in the job file"),)
        return ()

    def on_node_up(self, state: ToggleState, node: NodeUp) -> ToggleState:
        """A node agent that just started missed the commands given before: give them again at once."""
        again = tuple(
            Repeat(entry.key, entry.first_ms, 0)
            if entry.key.startswith(("launch/", "kill/")) and node_of(entry.key.split("/")[1]) == node.node
            else entry
            for entry in state.pending
        )
        return msgspec.structs.replace(state, pending=again)

    def on_trainer_released(self, state: ToggleState, released: TrainerReleased) -> ToggleState:
        if not state.release_wanted or released.epoch != state.release_epoch:
            return state  # of an earlier hand-over: says nothing about now
        return msgspec.structs.replace(state, trainer_resident=False, release_wanted=False)

    def on_trainer_ready(self, state: ToggleState) -> ToggleState:
        """A trainer process that (re)started may hold device memory until it is asked, and says, otherwise."""
        return msgspec.structs.replace(state, trainer_resident=True, release_wanted=False)

    def on_step_finished(self, state: ToggleState, finished: StepFinished) -> tuple[ToggleState, Effects]:
        if problem := wrong_batch(finished.batch, self.config.train_steps):
            return state, (Refuse(problem),)
        if finished.batch <= state.finished_batch:
            return state, ()
        costs = state.costs
        if state.last_step_ms:
            took_s = (state.clock_ms - state.last_step_ms) / 1000
            if state.toggled:
                costs = msgspec.structs.replace(costs, toggled_step_s=_average(costs.toggled_step_s, took_s))
            else:
                costs = msgspec.structs.replace(costs, plain_step_s=_average(costs.plain_step_s, took_s))
        state = msgspec.structs.replace(
            state,
            finished_batch=finished.batch,
            costs=costs,
            last_step_ms=max(1, state.clock_ms),
            toggled=False,
        )
        return state, ()

    def on_fact(self, state: ToggleState, fact: Fact) -> tuple[ToggleState, Effects]:
        if fact.worker == self.config.trainer and isinstance(fact, WorkerGone):
            following = Incarnation(max(state.trainer_incarnation, fact.incarnation + 1))
            return msgspec.structs.replace(state, trainer_incarnation=following), ()
        if fact.worker not in self._slots:
            if node_of(fact.worker) in self.config.nodes:
                return state, ()  # the cluster rebuilder's
            return state, (Refuse(f"worker {fact.worker}: its node is not in the job file"),)
        if problem := wrong_fact(state.table, None if state.snapshot is None else state.snapshot.version, fact):
            return state, (Refuse(problem),)
        old = next((entry for entry in state.workers if entry.worker == fact.worker), None)
        new = learn(old, fact, state.clock_ms)
        if new == old:
            return state, ()
        effects: Effects = ()
        if (ended := answered(fact, state.pending)) is not None:
            effects = (_timed(ended[0], fact.worker, state.clock_ms - ended[1]),)
        return msgspec.structs.replace(state, workers=remember(state.workers, new)), effects

    # Convergence

    def _converge(self, state: ToggleState) -> tuple[ToggleState, Effects]:
        """Report what the plan's part has reached, then give the commands that are due."""
        if state.table is None:
            return state, ()
        part = self._part(state.table.plan)
        view = self._view(state, state.table)
        effects: list[Effect] = []
        if part is not None:
            state, reports = self._report(view, part)
            effects.extend(reports)
        state = self._begin_hand_over(state, view.table, part)
        view = view._replace(state=state)
        orders = self._orders(view, part)
        pending, due = repeat(orders, state.pending, view.now_ms, self.config.command_retry_ms)
        known_keys = {entry.key for entry in state.pending}
        workers = dict(view.known)
        for order in due:
            message = order.message
            if isinstance(message, Launch):
                known = launched(workers.get(message.worker), message, view.now_ms)
                workers[message.worker] = msgspec.structs.replace(known, resident=True)
            elif isinstance(message, Activate):
                workers[message.worker] = msgspec.structs.replace(workers[message.worker], resident=True)
            if order.key not in known_keys:
                effects.extend(_note(message))
            effects.append(Send(message))
        known_workers = tuple(workers[worker] for worker in sorted(workers))
        return msgspec.structs.replace(state, pending=pending, workers=known_workers), tuple(effects)

    def _view(self, state: ToggleState, table: RoleTable) -> View:
        return View(
            state,
            table,
            state.clock_ms,
            {row.worker: row for row in table.rows},
            {entry.worker: entry for entry in state.workers},
        )

    def _part(self, plan: PlanRecord | None) -> Part | None:
        """This executor's share of the plan, or None if it has none."""
        if plan is None:
            return None
        add = tuple(entry for entry in plan.add if entry.worker in self._slots)
        remove = tuple(entry for entry in plan.remove if entry.worker in self._slots)
        reassign = tuple(entry for entry in plan.reassign if entry.worker in self._slots)
        if not (add or remove or reassign):
            return None
        return Part(plan.plan_id, plan.stage == "applying", add, remove, reassign)

    def _begin_hand_over(self, state: ToggleState, table: RoleTable, part: Part | None) -> ToggleState:
        """Number a release or a resumption that is wanted from now on."""
        if self._may_train(state, table) and state.resume_batch != table.training_batch:
            assert table.training_batch is not None
            return msgspec.structs.replace(
                state,
                resume_batch=table.training_batch,
                resume_epoch=table.epoch,
                trainer_resident=True,
                release_wanted=False,
            )
        if self._borrows(state, table, part) and state.trainer_resident and not state.release_wanted:
            # Above the last one even at an unchanged epoch: its answer is de-duplicated by this number.
            epoch = Epoch(max(table.epoch, state.release_epoch + 1))
            return msgspec.structs.replace(state, release_epoch=epoch, release_wanted=True)
        return state

    def _may_train(self, state: ToggleState, table: RoleTable) -> bool:
        """Training owns its GPUs for a batch not trained yet, and nothing of rollout's is left on them (DESIGN 11.2)."""
        if self.config.trainer is None or table.training_batch is None or table.training_batch <= state.finished_batch:
            return False
        if any(pair.residency is not Residency.TRAINING for pair in table.pairs):
            return False
        return not any(entry.resident and entry.alive for entry in state.workers)

    def _borrows(self, state: ToggleState, table: RoleTable, part: Part | None) -> bool:
        """A plan wants training GPUs for rollout, and training does not want them itself."""
        if part is None or not part.add or table.training_batch is not None:
            return False
        return part.applying or not _marked(state, part, "failed")

    def _orders(self, view: View, part: Part | None) -> list[Order]:
        state = view.state
        wanted: list[Order | None] = []
        if self._may_train(state, view.table):
            resume = TrainerResume(epoch=state.resume_epoch, batch=state.resume_batch)
            wanted.append(Order(f"resume/{state.resume_batch}/{state.resume_epoch}", resume))
        busy: set[WorkerId] = set()
        if part is not None:
            busy.update(entry.worker for entry in (*part.add, *part.remove, *part.reassign))
            if self._borrows(state, view.table, part):
                if state.trainer_resident:
                    wanted.append(self._release(view))
                else:
                    wanted.extend(self._join(view, entry, part.applying) for entry in part.add)
            if part.applying:
                wanted.extend(self._leave(view, entry) for entry in part.remove)
                wanted.extend(self._switch(view, entry) for entry in part.reassign)
        for worker, row in view.rows.items():
            known = view.known.get(worker)
            if worker not in busy and known is not None and known.alive and known.incarnation <= row.incarnation:
                wanted.append(self._settle(view, row, known))
        return [order for order in wanted if order is not None]

    def _release(self, view: View) -> Order:
        """Ask for the trainer's memory; a trainer that does not give it back is killed, and restarts without it."""
        state = view.state
        assert self.config.trainer is not None
        key = f"release/{state.release_epoch}"
        since = next((entry.first_ms for entry in state.pending if entry.key == key), view.now_ms)
        killing = any(entry.key == kill_key(self.config.trainer, state.trainer_incarnation) for entry in state.pending)
        if killing or view.now_ms - since >= self.config.release_ms:
            return kill_order(
                self.config.trainer, state.trainer_incarnation, self.config.kill_grace_ms, "not released in time"
            )
        return Order(key, TrainerRelease(epoch=state.release_epoch))

    def _join(self, view: View, assign: Assign, applying: bool) -> Order | None:
        """Process (if there is none), device state, newest weights, then (once the cut epoch is written) the role."""
        known = view.known.get(assign.worker)
        if known is None or known.incarnation < assign.incarnation:
            return launch_order(assign, self._slots[assign.worker].gpus)
        if known.incarnation > assign.incarnation or not known.alive:
            return None
        if not known.ready:
            return launch_order(assign, self._slots[assign.worker].gpus)
        if known.activated < assign.role_generation:
            message = Activate(
                worker=assign.worker, incarnation=assign.incarnation, role_generation=assign.role_generation
            )
            return Order(f"activate/{assign.worker}/{assign.incarnation}/{assign.role_generation}", message)
        snapshot = view.state.snapshot
        if snapshot is None:
            return None
        if known.version < snapshot.version:
            return update_order(known, snapshot)
        if applying and known.role_set < assign.role_generation:
            return role_order(assign)
        return None

    def _leave(self, view: View, leave: Leave) -> Order | None:
        """Drain, then give the device memory back; in time for the deadline, or the process ends."""
        row, known = view.rows.get(leave.worker), view.known.get(leave.worker)
        if row is None or _is_back(row, known):
            return None
        if leave.deadline_ms <= 0:
            return kill_order(row.worker, row.incarnation, 0, "reclaimed")
        if is_drained(row, known):
            return self._deactivate(view, row, row.incarnation, row.role_generation, leave.deadline_ms)
        return self._bounded(view, row, drain_order(row), leave.deadline_ms, "not drained in time")

    def _switch(self, view: View, assign: Assign) -> Order | None:
        row, known = view.rows.get(assign.worker), view.known.get(assign.worker)
        if row is None or has_left(row, known):
            return None
        if known is None or not is_drained(row, known):
            return self._bounded(view, row, drain_order(row), 0, "not drained in time")
        return role_order(assign) if known.role_set < assign.role_generation else None

    def _settle(self, view: View, row: Row, known: Progress) -> Order | None:
        """Rows outside the plan: an inactive one holds no device memory, an active one serves its generation."""
        if row.activity is Activity.INACTIVE and known.resident:
            if not known.ready:
                # Launched for a borrow that is off: it will hold memory once it is up, and cannot be asked yet.
                return kill_order(row.worker, known.incarnation, self.config.kill_grace_ms, "borrow undone")
            generation = max(row.role_generation, known.activated)
            return self._deactivate(view, row, known.incarnation, generation, 0)
        behind = known.ready and known.incarnation == row.incarnation and known.role_set < row.role_generation
        if row.activity is Activity.ACTIVE and behind:
            return role_order(Assign(row.worker, row.role, row.incarnation, row.role_generation))
        return None

    def _deactivate(
        self, view: View, row: Row, incarnation: Incarnation, generation: RoleGeneration, deadline_ms: int
    ) -> Order:
        message = Deactivate(worker=row.worker, incarnation=incarnation, role_generation=generation)
        order = Order(f"deactivate/{row.worker}/{incarnation}/{generation}", message)
        return self._bounded(view, row, order, deadline_ms, "not released in time")

    def _bounded(self, view: View, row: Row, order: Order, deadline_ms: int, reason: str) -> Order:
        """`order`, or the kill that replaces it when it stays unanswered too long or a return deadline is near."""
        reserve = self.config.kill_grace_ms + self.config.command_retry_ms
        if given_up(view.state.pending, row, order.key, view.now_ms, self.config.drain_ms, deadline_ms, reserve):
            left = deadline_ms - view.now_ms if deadline_ms > 0 else self.config.kill_grace_ms
            return kill_order(row.worker, row.incarnation, max(0, min(self.config.kill_grace_ms, left)), reason)
        return order

    # Reports

    def _report(self, view: View, part: Part) -> tuple[ToggleState, Effects]:
        """At most one "failed", one "prepared" and one "applied" a plan."""
        state = view.state
        if _marked(state, part, "failed"):
            return state, ()
        failed = self._failed(view, part)
        if failed:
            reason = "; ".join(f"{worker}: {why}" for worker, why in failed)
            report = PlanProgress(
                plan_id=part.plan_id,
                part=PART,
                report="failed",
                failed_workers=tuple(worker for worker, _ in failed),
                reason=reason,
            )
            note = Note("plan_failed", f"plan {part.plan_id} fails: {reason}", "warning")
            return _mark(state, part, "failed"), (note, Send(report))
        reached = "applied" if part.applying else "prepared"
        if _marked(state, part, reached) or not self._is_done(view, part):
            return state, ()
        effects: list[Effect] = []
        stage = "applying" if part.applying else "preparing"
        took_ms = view.now_ms - next(mark.at_ms for mark in state.marks if mark.report == stage)
        costs = state.costs
        if part.add and not part.applying:
            costs = msgspec.structs.replace(costs, borrow_s=_average(costs.borrow_s, took_ms / 1000))
            state = msgspec.structs.replace(state, toggled=True)
        elif part.remove and not part.add:
            costs = msgspec.structs.replace(costs, return_s=_average(costs.return_s, took_ms / 1000))
        if part.applying:
            effects.append(_timed("finalize", part.plan_id, took_ms))
        effects.append(Note(f"plan_{reached}", f"plan {part.plan_id}: the toggle manager's part is {reached}"))
        effects.append(Send(PlanProgress(plan_id=part.plan_id, part=PART, report=reached)))
        return _mark(msgspec.structs.replace(state, costs=costs), part, reached), tuple(effects)

    def _failed(self, view: View, part: Part) -> list[tuple[WorkerId, str]]:
        """Joiners that died or are late. (A role-changer that dies is the orchestrator's to replace, by a next plan.)"""
        found: list[tuple[WorkerId, str]] = []
        limit = self.config.prepare_ms
        since = next((mark.at_ms for mark in view.state.marks if mark.report == "preparing"), view.now_ms)
        for entry in part.add:
            known = view.known.get(entry.worker)
            if known is not None and known.incarnation > entry.incarnation:
                found.append((entry.worker, f"incarnation {known.incarnation} is newer than the plan's"))
            elif known is not None and known.incarnation == entry.incarnation and not known.alive:
                found.append((entry.worker, known.gone_reason))
            elif not part.applying and view.now_ms - since >= limit and not self._is_prepared(view, entry):
                found.append((entry.worker, f"not prepared within {limit} ms"))
        return found

    def _is_prepared(self, view: View, assign: Assign) -> bool:
        known, snapshot = view.known.get(assign.worker), view.state.snapshot
        return (
            not view.state.trainer_resident
            and known is not None
            and snapshot is not None
            and known.incarnation == assign.incarnation
            and known.ready
            and known.activated >= assign.role_generation
            and known.version >= snapshot.version
        )

    def _is_done(self, view: View, part: Part) -> bool:
        if not all(self._is_prepared(view, entry) for entry in part.add):
            return False
        if not part.applying:
            return True
        for entry in (*part.add, *part.reassign):
            row, known = view.rows.get(entry.worker), view.known.get(entry.worker)
            if entry in part.reassign and (row is None or has_left(row, known)):
                continue
            if known is None or known.incarnation != entry.incarnation or known.role_set < entry.role_generation:
                return False
        rows = (view.rows.get(leave.worker) for leave in part.remove)
        return all(row is None or _is_back(row, view.known.get(row.worker)) for row in rows)


def _is_back(row: Row, known: Progress | None) -> bool:
    """The worker's GPUs are free for training: device memory released, or no process left."""
    if has_left(row, known):
        return True
    return (
        known is not None
        and known.incarnation == row.incarnation
        and known.released >= row.role_generation
        and not known.resident
    )


def _average(old: float | None, sample: float) -> float:
    return sample if old is None else old + COST_WEIGHT * (sample - old)


def _marked(state: ToggleState, part: Part, report: str) -> bool:
    return any(mark.plan_id == part.plan_id and mark.report == report for mark in state.marks)


def _mark(state: ToggleState, part: Part, report: str) -> ToggleState:
    return msgspec.structs.replace(state, marks=(*state.marks, Mark(part.plan_id, report, state.clock_ms)))


def _note(message: Message) -> tuple[Note, ...]:
    match message:
        case Launch():
            return (Note("worker_launch", f"launch {message.worker} incarnation {message.incarnation}"),)
        case Kill():
            text = f"kill {message.worker} incarnation {message.incarnation}: {message.reason}"
            return (Note("worker_kill", text),)
        case TrainerResume():
            return (Note("trainer_resume", f"train batch {message.batch} as of epoch {message.epoch}"),)
        case TrainerRelease():
            return (Note("trainer_release", f"release training GPUs (release {message.epoch})"),)
        case _:
            return ()


def _timed(operation: str, worker: str, took_ms: int) -> Send:
    return Send(OperationTimed(operation=operation, worker=worker, took_s=max(0, took_ms) / 1000))
