"""Cluster rebuilder core (paper 4.5): makes the dedicated zone's processes agree with the role table.

What it wants to be true follows from the table alone: the plan in it, and its inactive rows. A plan's message only
wakes it. So a plan that is superseded or rolled back is obeyed no longer the moment the table says so, a restart
needs no recovery, and repeating any input is harmless.

- Expansion: launch joiners in the background, bring each to the newest snapshot only after it has initialised (lazy
  propagation), report "prepared" when the whole group is there; at the applying stage give them their roles.
  Until the admit epoch they follow each new version.
- Shrink: drain leavers, then end their processes, in time for the return deadline whatever they answer.
- All or nothing: one joiner that dies or is late fails the plan; the table then takes the group back, and whoever
  lives in an inactive slot is killed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from messages.decision_engine import Leave
from messages.elastic_scheduler import NodeUp
from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import Activity, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress, RoleSet, WeightsApplied, WorkerDrained, WorkerGone, WorkerReady
from messages.pipeline_scheduler import WeightsPublished
from messages.runtime_tracker import OperationTimed
from messages.subjects import node_of
from pearl_state.model import RoleTable, Row
from pearl_state.orders import (
    Order,
    Repeat,
    answered,
    asked_again,
    drain_order,
    given_up,
    join_order,
    kill_key,
    kill_order,
    launch_order,
    repeat,
    role_order,
    split_by_worker,
)
from pearl_state.parts import Part, failure, kept_marks, marked, misplaced, part_for, part_of, roles_are_set
from pearl_state.peers import wrong_fact, wrong_weights
from pearl_state.progress import Fact, Mark, Progress, has_left, is_drained, launched, learn, remember, slim
from services.cluster_rebuilder.config import Config
from services.runtime.core import Effect, Effects, Input, Note, Refuse, Send, Tick

PART = "rebuilder"


class RebuilderState(msgspec.Struct, frozen=True, kw_only=True):
    """The table as last seen, what is known of each process, and the commands that await an answer."""

    clock_ms: int = 0
    table: RoleTable | None = None
    snapshot: WeightsPublished | None = None  # the newest
    snapshots_since_ms: int = 0  # when the first one came
    workers: tuple[Progress, ...] = ()
    pending: tuple[Repeat, ...] = ()
    marks: tuple[Mark, ...] = ()  # of the plan in the table


class View(NamedTuple):
    """The state, indexed, for one convergence."""

    state: RebuilderState
    now_ms: int
    rows: dict[WorkerId, Row]
    known: dict[WorkerId, Progress]
    pending: dict[str, Repeat]  # by key; only one worker's, if news came of one


class ClusterRebuilderCore:
    """`step` of the cluster rebuilder."""

    name = "cluster_rebuilder"
    inputs: tuple[type[Message], ...] = (
        ReconfigurationPlan,
        NodeUp,
        WorkerReady,
        WeightsApplied,
        WorkerDrained,
        RoleSet,
        WorkerGone,
        WeightsPublished,
    )
    state_type = RebuilderState

    def __init__(self, config: Config) -> None:
        self.config = config
        self._slots = {slot.worker: slot for slot in config.slots}

    def initial(self) -> RebuilderState:
        return RebuilderState()

    def step(self, state: RebuilderState, event: Input) -> tuple[RebuilderState, Effects]:
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
                effects = self.on_plan(state, plan)
            case WeightsPublished() as snapshot:
                state, effects = self.on_weights_published(state, snapshot)
            case NodeUp() as node:
                state, effects = self.on_node_up(state, node)
            case WorkerReady() | WeightsApplied() | WorkerDrained() | RoleSet() | WorkerGone() as fact:
                state, effects = self.on_fact(state, fact)
            case other:
                effects = (Refuse(f"{type(other).__name__} is no input of the cluster rebuilder"),)
        if any(isinstance(effect, Refuse) for effect in effects):
            return before, effects
        state, more = self._converge(state, event.message.worker if isinstance(event.message, Fact) else None)
        return state, effects + more

    # Events

    def on_table(self, state: RebuilderState, table: RoleTable) -> RebuilderState:
        if state.table is not None and table.epoch <= state.table.epoch:
            return state
        mine = slim(table, (row for row in table.rows if row.worker in self._slots))
        state = msgspec.structs.replace(state, table=mine, marks=kept_marks(state.marks, table))
        part = part_of(mine.plan, self._slots)
        if part is not None and part.applying and not marked(state.marks, part, "applying"):
            state = _mark(state, part, "applying")
        return state

    def on_plan(self, state: RebuilderState, plan: ReconfigurationPlan) -> Effects:
        """The table is the order; this message only says that there is one (and wakes a slow replica's reader)."""
        if problem := misplaced(plan, self.config.nodes):
            return (Refuse(problem),)
        if state.table is None or state.table.epoch < plan.epoch:
            return (Note("plan_awaits_table", f"plan {plan.plan_id} waits for table epoch {plan.epoch}", "debug"),)
        return ()

    def on_weights_published(self, state: RebuilderState, snapshot: WeightsPublished) -> tuple[RebuilderState, Effects]:
        if problem := wrong_weights(snapshot, self.config.train_steps):
            return state, (Refuse(problem),)
        if state.snapshot is not None and snapshot.version <= state.snapshot.version:
            return state, ()
        since_ms = state.snapshots_since_ms or max(1, state.clock_ms)
        return msgspec.structs.replace(state, snapshot=snapshot, snapshots_since_ms=since_ms), ()

    def on_node_up(self, state: RebuilderState, node: NodeUp) -> tuple[RebuilderState, Effects]:
        """A node agent that just started missed the commands given before: give them again at once."""
        if node.node not in self.config.nodes:
            return state, (Refuse(f"node {node.node} is not in the job file"),)
        return msgspec.structs.replace(state, pending=asked_again(state.pending, node.node)), ()

    def on_fact(self, state: RebuilderState, fact: Fact) -> tuple[RebuilderState, Effects]:
        if fact.worker not in self._slots:
            if node_of(fact.worker) in self.config.nodes:
                return state, ()  # an overlap worker's or a trainer's
            return state, (Refuse(f"worker {fact.worker}: its node is not in the job file"),)
        if problem := wrong_fact(state.table, None if state.snapshot is None else state.snapshot.version, fact):
            return state, (Refuse(problem),)
        old = _find(state, fact.worker)
        new = learn(old, fact, state.clock_ms)
        if new == old:
            return state, ()
        state = msgspec.structs.replace(state, workers=remember(state.workers, new))
        return state, self._timings(state, fact, old, new)

    def _timings(self, state: RebuilderState, fact: Fact, old: Progress | None, new: Progress) -> Effects:
        """What the operation that this fact ends took (paper Table 3)."""
        effects: list[Effect] = []
        if (ended := answered(fact, state.pending)) is not None:
            effects.append(_timed(ended[0], fact.worker, state.clock_ms - ended[1]))
        if new.version >= 0 and new.launched_ms and (old is None or old.version < 0):
            effects.append(_timed("prepare", fact.worker, state.clock_ms - new.launched_ms))
        return tuple(effects)

    # Convergence

    def _converge(self, state: RebuilderState, worker: WorkerId | None) -> tuple[RebuilderState, Effects]:
        """Report what the plan's part has reached, then give the commands that are due.

        After a fact of one worker only that worker's commands can have changed, so only they are looked at: a plan of a thousand
        workers brings thousands of facts, and each must cost far less than `command_retry_ms` / 1000, or commands are
        repeated faster than their answers are read.
        """
        if state.table is None:
            return state, ()
        part = part_of(state.table.plan, self._slots)
        before, others = (state.pending, ()) if worker is None else split_by_worker(state.pending, worker)
        view = View(
            state,
            state.clock_ms,
            {row.worker: row for row in state.table.rows},
            {entry.worker: entry for entry in state.workers},
            {entry.key: entry for entry in before},
        )
        effects: list[Effect] = []
        if part is not None:
            state, reports = self._report(view, part, worker)
            view = view._replace(state=state)
            effects.extend(reports)
        pending, due = repeat(self._orders(view, part, worker), before, view.now_ms, self.config.command_retry_ms)
        workers = state.workers
        for order in due:
            message = order.message
            if isinstance(message, Launch):
                workers = remember(workers, launched(view.known.get(message.worker), message, view.now_ms))
            if order.key not in view.pending and isinstance(message, (Launch, Kill)):
                why = f": {message.reason}" if isinstance(message, Kill) else ""
                verb = "launch" if isinstance(message, Launch) else "kill"
                text = f"{verb} {message.worker} incarnation {message.incarnation}{why}"
                effects.append(Note(f"worker_{verb}", text))
            effects.append(Send(message))
        return msgspec.structs.replace(state, pending=(*others, *pending), workers=workers), tuple(effects)

    def _orders(self, view: View, part: Part | None, only: WorkerId | None) -> list[Order]:
        """The commands that are wanted of this worker (None: of every worker)."""
        wanted: list[Order | None] = []
        busy: set[WorkerId] = set()
        part = part if part is None or only is None else part_for(part, only)
        if part is not None:
            busy.update(entry.worker for entry in (*part.add, *part.remove, *part.reassign))
            if part.applying or not marked(view.state.marks, part, "failed"):
                wanted.extend(self._join(view, entry, part.applying) for entry in part.add)
            if part.applying:
                wanted.extend(self._leave(view, entry) for entry in part.remove)
                wanted.extend(self._switch(view, entry) for entry in part.reassign)
        for worker in view.rows if only is None else (only,):
            row, known = view.rows.get(worker), view.known.get(worker)
            if row is None:
                continue
            if worker not in busy and known is not None and known.alive and known.incarnation <= row.incarnation:
                wanted.append(self._settle(row, known))
        return [order for order in wanted if order is not None]

    def _join(self, view: View, assign: Assign, applying: bool) -> Order | None:
        """Launch, then the newest weights, then (once the cut epoch is written) the role."""
        known = view.known.get(assign.worker)
        if known is None or known.incarnation < assign.incarnation:
            return self._launch(assign)
        if known.incarnation > assign.incarnation or not known.alive:
            return None
        if not known.ready:
            return self._launch(assign)
        return join_order(known, view.state.snapshot, assign, applying=applying)

    def _launch(self, assign: Assign) -> Order:
        return launch_order(assign, self._slots[assign.worker].gpus)

    def _leave(self, view: View, leave: Leave) -> Order | None:
        """Drain, then end the process; straight to its end where the GPUs are gone already."""
        row, known = view.rows.get(leave.worker), view.known.get(leave.worker)
        if row is None or has_left(row, known):
            return None
        if leave.deadline_ms <= 0:
            return kill_order(row.worker, row.incarnation, 0, "reclaimed")
        if is_drained(row, known):
            return kill_order(row.worker, row.incarnation, self._grace_ms(view, leave.deadline_ms), "drained")
        return self._drain(view, row, leave.deadline_ms)

    def _switch(self, view: View, assign: Assign) -> Order | None:
        """Drain, then the new role. A worker that does not drain is killed and has left."""
        row, known = view.rows.get(assign.worker), view.known.get(assign.worker)
        if row is None or has_left(row, known):
            return None
        if known is None or not is_drained(row, known):
            return self._drain(view, row, deadline_ms=0)
        return role_order(assign) if known.role_set < assign.role_generation else None

    def _drain(self, view: View, row: Row, deadline_ms: int) -> Order:
        order = drain_order(row)
        reserve = self.config.kill_grace_ms + self.config.command_retry_ms
        killed_by = kill_key(row.worker, row.incarnation)
        if given_up(view.pending, order.key, killed_by, view.now_ms, self.config.drain_ms, deadline_ms, reserve):
            return kill_order(row.worker, row.incarnation, self._grace_ms(view, deadline_ms), "not drained in time")
        return order

    def _settle(self, row: Row, known: Progress) -> Order | None:
        """Rows outside the plan: an inactive one has no process, an active one serves the generation it has."""
        if row.activity is Activity.INACTIVE:
            return kill_order(row.worker, known.incarnation, self.config.kill_grace_ms, "its slot is inactive")
        behind = known.ready and known.incarnation == row.incarnation and known.role_set < row.role_generation
        if row.activity is Activity.ACTIVE and behind:
            # A plan rolled back after the cut epoch: the worker was drained for a change that did not come.
            return role_order(Assign(row.worker, row.role, row.incarnation, row.role_generation))
        return None

    def _grace_ms(self, view: View, deadline_ms: int) -> int:
        """Time between SIGTERM and SIGKILL that a return deadline (0: none) leaves."""
        left = deadline_ms - view.now_ms if deadline_ms > 0 else self.config.kill_grace_ms
        return max(0, min(self.config.kill_grace_ms, left))

    # Reports

    def _report(self, view: View, part: Part, worker: WorkerId | None) -> tuple[RebuilderState, Effects]:
        """At most one "failed", one "prepared" and one "applied" a plan; `worker`: the only one that news came of."""
        state = view.state
        if marked(state.marks, part, "failed"):
            return state, ()
        own = part if worker is None else part_for(part, worker)
        failed = self._failed(view, own)
        if failed:
            report = failure(part, PART, failed)
            note = Note("plan_failed", f"plan {part.plan_id} fails: {report.reason}", "warning")
            return _mark(state, part, "failed"), (note, Send(report))
        reached = "applied" if part.applying else "prepared"
        if marked(state.marks, part, reached) or not (self._is_done(view, own) and self._is_done(view, part)):
            return state, ()
        effects: list[Effect] = []
        if part.applying:
            since = next(mark.at_ms for mark in state.marks if mark.report == "applying")
            effects.append(_timed("finalize", part.plan_id, view.now_ms - since))
        effects.append(Note(f"plan_{reached}", f"plan {part.plan_id}: the rebuilder's part is {reached}"))
        effects.append(Send(PlanProgress(plan_id=part.plan_id, part=PART, report=reached)))
        return _mark(state, part, reached), tuple(effects)

    def _failed(self, view: View, part: Part) -> list[tuple[WorkerId, str]]:
        """Joiners that died or are late. (A role-changer that dies is the orchestrator's to replace, by a next plan.)"""
        found: list[tuple[WorkerId, str]] = []
        for entry in part.add:
            known = view.known.get(entry.worker)
            if known is None or known.incarnation < entry.incarnation:
                continue
            if known.incarnation > entry.incarnation:
                found.append((entry.worker, f"incarnation {known.incarnation} is newer than the plan's"))
            elif not known.alive:
                found.append((entry.worker, known.gone_reason))
            elif not part.applying and (why := self._late(view.state, known)):
                found.append((entry.worker, why))
        return found

    def _late(self, state: RebuilderState, known: Progress) -> str:
        """Why a joiner has used up its time, or ""."""
        limit = self.config.prepare_ms
        if not known.ready:
            waited = known.launched_ms > 0 and state.clock_ms - known.launched_ms >= limit
            return f"not ready within {limit} ms" if waited else ""
        if known.version < 0 and state.snapshot is not None:
            waited = state.clock_ms - max(known.ready_ms, state.snapshots_since_ms) >= limit
            return f"no weights within {limit} ms of being ready" if waited else ""
        return ""

    def _is_done(self, view: View, part: Part) -> bool:
        """The stage's work is finished: joiners hold the newest weights; applying, all left and all roles set."""
        snapshot = view.state.snapshot
        for entry in part.add:
            known = view.known.get(entry.worker)
            if known is None or snapshot is None or known.incarnation != entry.incarnation:
                return False
            if not known.ready or known.version < snapshot.version:
                return False
        if not part.applying:
            return True
        if not roles_are_set(part, view.rows, view.known):
            return False
        rows = (view.rows.get(leave.worker) for leave in part.remove)
        return all(row is None or has_left(row, view.known.get(row.worker)) for row in rows)


def _find(state: RebuilderState, worker: WorkerId) -> Progress | None:
    return next((entry for entry in state.workers if entry.worker == worker), None)


def _mark(state: RebuilderState, part: Part, report: str) -> RebuilderState:
    return msgspec.structs.replace(state, marks=(*state.marks, Mark(part.plan_id, report, state.clock_ms)))


def _timed(operation: str, worker: str, took_ms: int) -> Send:
    return Send(OperationTimed(operation=operation, worker=worker, took_s=max(0, took_ms) / 1000))
