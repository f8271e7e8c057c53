"""Toggle manager core (paper 4.6): makes the overlap zone's device state agree with the role table.

Processes live on; only device state moves. As with the cluster rebuilder, all that it wants follows from the table: the
residency of each pair says whose device state may be on its GPUs, and is the only permission to put any there. The
orchestrator moves it on by the facts that are caused here.

- Processes: every overlap slot has one from the start. It holds no device memory before it is activated.
- `training`, with training owning its GPUs for batch k: the trainer is told to train k until the step is finished.
- `releasing`: the trainer is asked for its device memory until it says that it is free.
- `activating`, for a worker that the plan adds: Activate -> WorkerActivated -> newest weights -> "prepared"; after the cut
  epoch SetRole -> "applied".
- `draining`: Drain -> WorkerDrained -> Deactivate -> WorkerReleased; plan or no plan, and whatever half-done borrow it is
  the end of. A worker that does not answer in time is killed: its process's end gives the GPUs back as well.
- A borrow that training would take back at once is vetoed while nothing but its joiners has changed.

Here are its events, its reports, and what lending is found to cost. Which commands follow from the table is in
`core_orders.py`, what is known in `core_state.py`.
"""

from __future__ import annotations

import msgspec

from messages.elastic_scheduler import NodeUp, TrainingBegin
from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Epoch, Incarnation, Residency, WorkerId
from messages.monitor import GpusReturned
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
from messages.runtime_tracker import OperationTimed
from messages.subjects import node_of
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import RoleTable, Row
from pearl_state.orders import (
    answered,
    asked_again,
    repeat,
)
from pearl_state.parts import Part, failure, kept_marks, marked, misplaced, part_of, roles_are_set
from pearl_state.peers import wrong_batch, wrong_fact, wrong_next_batch, wrong_weights
from pearl_state.progress import Fact, Mark, Progress, has_left, launched, learn, remember, slim
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick
from services.toggle_manager.config import Config
from services.toggle_manager.core_orders import may_train, orders, releases
from services.toggle_manager.core_state import ToggleState, View, is_any, is_given_up

PART = "toggle"
COST_WEIGHT = 0.3
"""Weight of the newest sample in the moving averages (paper 5): about the last five hand-overs count."""


class ToggleManagerCore:
    """`step` of the toggle manager."""

    name = "toggle_manager"
    inputs: tuple[type[Message], ...] = (
        ReconfigurationPlan,
        NodeUp,
        TrainingBegin,
        WorkerReady,
        WeightsApplied,
        WorkerDrained,
        RoleSet,
        WorkerActivated,
        WorkerReleased,
        WorkerGone,
        WeightsPublished,
        TrainerReleased,
        TrainerResumed,
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
                state, effects = self.on_table(state, table)
            case ReconfigurationPlan() as plan:
                effects = self.on_plan(plan)
            case NodeUp() as node:
                state = self.on_node_up(state, node)
            case TrainingBegin() as begin:
                # Batch k trains version k: that one is published before it begins.
                version = 0 if state.snapshot is None else state.snapshot.version
                if problem := wrong_batch(begin.batch, self.config.train_steps) or wrong_next_batch(
                    begin.batch, version - 1
                ):
                    effects = (Refuse(problem),)
                else:
                    state = msgspec.structs.replace(state, begun_batch=max(state.begun_batch, begin.batch))
            case WeightsPublished() as snapshot:
                if problem := wrong_weights(snapshot, self.config.train_steps):
                    effects = (Refuse(problem),)
                elif state.snapshot is None or snapshot.version > state.snapshot.version:
                    state = msgspec.structs.replace(state, snapshot=snapshot)
            case TrainerReleased() as released:
                state = self.on_trainer_released(state, released)
            case TrainerResumed() as resumed:
                state, effects = self.on_trainer_resumed(state, resumed)
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

    def on_table(self, state: ToggleState, table: RoleTable) -> tuple[ToggleState, Effects]:
        old = state.table
        if old is not None and table.epoch <= old.epoch:
            return state, ()
        mine = slim(table, (row for row in table.rows if row.worker in self._slots))
        state = msgspec.structs.replace(state, table=mine, marks=kept_marks(state.marks, table))
        part = part_of(mine.plan, self._slots)
        if part is not None:
            stage = "applying" if part.applying else "preparing"
            if not marked(state.marks, part, stage):
                state = _mark(state, part, stage)
        if is_any(mine, Residency.RELEASING) and not is_any(old, Residency.RELEASING):
            # Whatever was known of an earlier hand-over: this one wants an answer of its own.
            state = msgspec.structs.replace(state, trainer_resident=True, release_wanted=False)
        return self._returned(self._timed_hand_overs(state, old, mine), old, mine)

    def _timed_hand_overs(self, state: ToggleState, old: RoleTable | None, new: RoleTable) -> ToggleState:
        """When borrows and returns begin and end, by the table."""
        borrowing = (Residency.RELEASING, Residency.ACTIVATING)
        if is_any(new, *borrowing) and not is_any(old, *borrowing):
            state = msgspec.structs.replace(state, borrow_since_ms=max(1, state.clock_ms), spoiled=False)
        if is_any(new, Residency.DRAINING) and not state.return_since_ms:
            return msgspec.structs.replace(state, return_since_ms=max(1, state.clock_ms), borrow_since_ms=0)
        if state.return_since_ms and not is_any(new, Residency.DRAINING):
            if state.spoiled:
                return msgspec.structs.replace(state, return_since_ms=0)
            took_s = max(0, state.clock_ms - state.return_since_ms) / 1000
            costs = msgspec.structs.replace(state.costs, return_s=_average(state.costs.return_s, took_s))
            return msgspec.structs.replace(state, return_since_ms=0, returned_s=took_s, costs=costs)
        return state

    def _returned(self, state: ToggleState, old: RoleTable | None, table: RoleTable) -> tuple[ToggleState, Effects]:
        """Training has its GPUs: say when it had asked for them by, where they were lent."""
        batch = table.training_batch
        if batch is None or batch <= state.returned_batch:
            return state, ()
        state = msgspec.structs.replace(state, returned_batch=batch)
        if old is not None and old.training_batch is not None:
            return state, ()  # a batch that follows at once: training had its GPUs, and the deadline was the last one's
        asked = [pair for pair in table.pairs if pair.deadline_ms]
        if not asked:
            return state, ()
        returned = GpusReturned(
            batch=batch,
            workers=tuple(pair.overlap for pair in asked),
            deadline_ms=min(pair.deadline_ms for pair in asked),
            at_ms=table.training_since_ms,
        )
        spare_ms = returned.deadline_ms - returned.at_ms
        level = "info" if spare_ms >= 0 else "warning"
        note = Note(
            "gpus_returned", f"training has its GPUs for batch {batch}, {spare_ms} ms before its deadline", level
        )
        return state, (Send(returned), note)

    def on_plan(self, plan: ReconfigurationPlan) -> Effects:
        """The table is the order; this message only says that there is one."""
        if problem := misplaced(plan, self.config.nodes):
            return (Refuse(problem),)
        return ()

    def on_node_up(self, state: ToggleState, node: NodeUp) -> ToggleState:
        """A node agent that just started missed the commands given before: give them again at once."""
        return msgspec.structs.replace(state, pending=asked_again(state.pending, node.node))

    def on_trainer_released(self, state: ToggleState, released: TrainerReleased) -> ToggleState:
        if not state.release_wanted or released.epoch != state.release_epoch:
            return state  # of an earlier hand-over: says nothing about now
        return msgspec.structs.replace(state, trainer_resident=False, release_wanted=False)

    def on_trainer_resumed(self, state: ToggleState, resumed: TrainerResumed) -> tuple[ToggleState, Effects]:
        """The trainer has its device state back: a return is complete, and what it took is known."""
        if (resumed.epoch, resumed.batch) != (state.resume_epoch, state.resume_batch) or state.resumed:
            return state, ()
        effects: Effects = ()
        if state.returned_s is not None and not state.spoiled:
            took_ms = round(state.returned_s * 1000) + resumed.took_ms
            effects = (_timed("deactivate", self.config.trainer or "", took_ms),)
        return msgspec.structs.replace(state, resumed=True, returned_s=None), effects

    def on_trainer_ready(self, state: ToggleState) -> ToggleState:
        """A trainer process that (re)started knows of no command, and may hold device memory until it says otherwise."""
        return msgspec.structs.replace(
            state, trainer_resident=True, release_wanted=False, resume_batch=-1, resumed=False, spoiled=True
        )

    def on_step_finished(self, state: ToggleState, finished: StepFinished) -> tuple[ToggleState, Effects]:
        if problem := wrong_batch(finished.batch, self.config.train_steps):
            return state, (Refuse(problem),)
        if finished.batch <= state.finished_batch:
            return state, ()
        costs, effects = state.costs, ()
        if state.last_step_ms:
            took_ms = state.clock_ms - state.last_step_ms
            if state.toggled:
                costs = msgspec.structs.replace(costs, toggled_step_s=_average(costs.toggled_step_s, took_ms / 1000))
            else:
                costs = msgspec.structs.replace(costs, plain_step_s=_average(costs.plain_step_s, took_ms / 1000))
            operation = "toggled_step" if state.toggled else "plain_step"
            effects = (_timed(operation, self.config.trainer or "", took_ms),)
        state = msgspec.structs.replace(
            state,
            finished_batch=finished.batch,
            costs=costs,
            last_step_ms=max(1, state.clock_ms),
            toggled=False,
        )
        return state, effects

    def on_fact(self, state: ToggleState, fact: Fact) -> tuple[ToggleState, Effects]:
        if fact.worker == self.config.trainer and isinstance(fact, WorkerGone):
            if fact.incarnation < state.trainer_incarnation:
                return state, ()
            # What is gone holds nothing; the next process says for itself.
            following = Incarnation(fact.incarnation + 1)
            return msgspec.structs.replace(
                state, trainer_incarnation=following, trainer_resident=False, release_wanted=False, spoiled=True
            ), ()
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
        if isinstance(fact, WorkerGone):
            state = msgspec.structs.replace(state, spoiled=True)
        effects: Effects = ()
        if (ended := answered(fact, state.pending)) is not None:
            effects = (_timed(ended[0], fact.worker, state.clock_ms - ended[1]),)
        return msgspec.structs.replace(state, workers=remember(state.workers, new)), effects

    # Convergence

    def _converge(self, state: ToggleState) -> tuple[ToggleState, Effects]:
        """Report what the plan's part has reached, then give the commands that are due."""
        if state.table is None:
            return state, ()
        part = part_of(state.table.plan, self._slots)
        view = self._view(state, state.table)
        effects: list[Effect] = []
        if part is not None:
            state, reports = self._report(view, part)
            effects.extend(reports)
        state = self._begin_hand_over(state, view.table)
        view = view._replace(state=state)
        wanted = orders(self.config, view, part)
        pending, due = repeat(wanted, state.pending, view.now_ms, self.config.command_retry_ms)
        workers = dict(view.known)
        for order in due:
            message = order.message
            if isinstance(message, Launch):
                workers[message.worker] = launched(workers.get(message.worker), message, view.now_ms)
            if order.key not in view.pending:
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
            {pair.overlap: pair for pair in table.pairs},
            {entry.worker: entry for entry in state.workers},
            {entry.key: entry for entry in state.pending},
            self._slots,
        )

    def _begin_hand_over(self, state: ToggleState, table: RoleTable) -> ToggleState:
        """Number a release or a resumption that is wanted from now on."""
        if may_train(self.config, state, table):
            if state.resume_batch == table.training_batch:
                return state
            assert table.training_batch is not None
            return msgspec.structs.replace(
                state,
                resume_batch=table.training_batch,
                resume_epoch=Epoch(max(table.epoch, state.resume_epoch + 1)),
                resumed=False,
                trainer_resident=True,
                release_wanted=False,
            )
        if releases(self.config, state, table) and not state.release_wanted:
            # Above the last one even at an unchanged epoch: its answer is de-duplicated by this number.
            epoch = Epoch(max(table.epoch, state.release_epoch + 1))
            return msgspec.structs.replace(state, release_epoch=epoch, release_wanted=True)
        return state

    # Reports

    def _report(self, view: View, part: Part) -> tuple[ToggleState, Effects]:
        """At most one "failed" or "vetoed", one "prepared" and one "applied" a plan."""
        state = view.state
        if is_given_up(state, part):
            return state, ()
        failed = self._failed(view, part)
        if failed:
            report = failure(part, PART, failed)
            note = Note("plan_failed", f"plan {part.plan_id} fails: {report.reason}", "warning")
            return _mark(state, part, "failed"), (note, Send(report))
        if part.add and not part.applying and state.begun_batch > state.finished_batch:
            reason = f"training wants its GPUs for batch {state.begun_batch}"
            veto = PlanProgress(plan_id=part.plan_id, part=PART, report="vetoed", reason=reason)
            return _mark(state, part, "vetoed"), (Note("plan_vetoed", f"plan {part.plan_id}: {reason}"), Send(veto))
        reached = "applied" if part.applying else "prepared"
        if marked(state.marks, part, reached) or not self._is_done(view, part):
            return state, ()
        effects: list[Effect] = []
        if part.add and not part.applying:
            state = msgspec.structs.replace(state, toggled=True)
        if part.add and not part.applying and state.borrow_since_ms and not state.spoiled:
            took_ms = view.now_ms - state.borrow_since_ms
            costs = msgspec.structs.replace(state.costs, borrow_s=_average(state.costs.borrow_s, took_ms / 1000))
            state = msgspec.structs.replace(state, borrow_since_ms=0, costs=costs)
            effects.append(_timed("activate", part.plan_id, took_ms))
        if part.applying:
            since_ms = next((mark.at_ms for mark in state.marks if mark.report == "applying"), view.now_ms)
            effects.append(_timed("finalize", part.plan_id, view.now_ms - since_ms))
        effects.append(Note(f"plan_{reached}", f"plan {part.plan_id}: the toggle manager's part is {reached}"))
        effects.append(Send(PlanProgress(plan_id=part.plan_id, part=PART, report=reached)))
        return _mark(state, part, reached), tuple(effects)

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
        if not roles_are_set(part, view.rows, view.known):
            return False
        rows = (view.rows.get(leave.worker) for leave in part.remove)
        return all(row is None or _is_back(row, view.known.get(row.worker)) for row in rows)


def _is_back(row: Row, known: Progress | None) -> bool:
    """The worker's GPUs are free for training: device memory released, or no process left."""
    if has_left(row, known):
        return True
    return known is not None and known.incarnation == row.incarnation and known.released >= row.role_generation


def _average(old: float | None, sample: float) -> float:
    return sample if old is None else old + COST_WEIGHT * (sample - old)


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
