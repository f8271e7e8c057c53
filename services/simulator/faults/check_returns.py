"""Promises about time (DESIGN 11.7 and issue "liveness"): returns by their deadline, and an end once faults stop."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.ids import Activity, Residency, WorkerId, Zone
from pearl_state.model import RoleTable
from services.simulator.faults.history import History, Process, Promise
from services.simulator.faults.record import (
    FaultsStopped,
    MemoryHeld,
    ProcessBegan,
    ProcessEnded,
    RunEnded,
    Seen,
    Stored,
    TableWritten,
)

TOLERANCE_MS = 500
"""A deadline is enforced by a tick of the node agent, a message's way and a signal; it is not met to the millisecond."""
RETRIES = 3
"""Repetitions of a lost command that the return of a lent GPU may need beyond its deadline."""
BACKOFF_MOST_MS = 60_000
"""A slot that failed often is tried again after so long (DESIGN 4): nothing can be faster where one did."""


class Return(msgspec.Struct):
    """GPUs that a process must have let go of by a deadline. `asked_ms`: when that was said."""

    process: Process
    node: str
    asked_ms: int
    deadline_ms: int
    lent: bool


class Returns(Promise):
    """Every mandatory return is done by its deadline, whatever the workers do.

    Reclaimed GPUs: the node agent ends what runs on them, so only time in which it was down or cut off is deducted. Lent
    GPUs: the control services carry the return out, and their outages are deducted too.
    """

    name = "11.7 returns by their deadline"
    kinds = (Stored, TableWritten, MemoryHeld, ProcessBegan, ProcessEnded, RunEnded)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.counted = 0
        self.latest_ms = 0  # the largest time beyond a deadline, deductions made
        self._due: list[Return] = []
        self._zones = {node.name: node.zone for node in self.job.nodes}

    def see(self, seen: Seen) -> Iterator[str]:
        if self._due:
            yield from self._overdue(seen.at_ms)
        match seen:
            case Stored(message=GpuReclaimed() as event) if self._zones.get(event.node) is Zone.PREEMPTIBLE:
                self._reclaim(event, seen.at_ms)
            case Stored(message=GpuAvailable() as event):
                self._take_back(event, seen.at_ms)
            case TableWritten():
                self._lent(seen.table, seen.at_ms)
            case MemoryHeld(held=False) | ProcessEnded():
                process = (seen.worker, seen.incarnation)
                gone = isinstance(seen, ProcessEnded)
                done = [due for due in self._due if due.process == process and (gone or due.lent)]
                self._due = [due for due in self._due if due not in done]
                for due in done:
                    yield from self._judge(due, seen.at_ms)
            case RunEnded():
                for due in self._due:
                    if seen.at_ms > due.deadline_ms:
                        yield from self._judge(due, seen.at_ms)
                self._due = []
            case _:
                pass

    def _overdue(self, at_ms: int) -> Iterator[str]:
        """Those that are late already, and not done yet: each is told once."""
        late = [
            due for due in self._due if at_ms > due.deadline_ms and self._late_ms(due, at_ms) > self._allowed_ms(due)
        ]
        self._due = [due for due in self._due if due not in late]
        for due in late:
            yield from self._judge(due, at_ms)

    def _reclaim(self, event: GpuReclaimed, at_ms: int) -> None:
        deadline_ms = at_ms + event.notice_ms
        for process, began in self.history.alive.items():
            if began.node == event.node and set(began.gpus) & set(event.gpus):
                sooner = [due for due in self._due if due.process == process and due.deadline_ms <= deadline_ms]
                if not sooner:
                    self._due.append(Return(process, event.node, at_ms, deadline_ms, False))

    def _take_back(self, event: GpuAvailable, at_ms: int) -> None:
        """A reclaim that was taken back before its deadline binds no one. (Afterwards it still does: it was due.)"""

        def over(due: Return) -> bool:
            began = self.history.alive.get(due.process)
            return (
                not due.lent
                and due.node == event.node
                and began is not None
                and bool(set(began.gpus) & set(event.gpus))
                and at_ms <= due.deadline_ms + TOLERANCE_MS
            )

        self._due = [due for due in self._due if not over(due)]

    def _lent(self, table: RoleTable, at_ms: int) -> None:
        for pair in table.pairs:
            row = self.history.rows[pair.overlap]
            process = (row.worker, int(row.incarnation))
            holding = pair.residency in (Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING)
            if not (pair.deadline_ms and holding and process in self.history.alive and self.history.holds(process)):
                continue
            known = next((due for due in self._due if due.process == process and due.lent), None)
            if known is None:
                self._due.append(Return(process, row.gpus[0].node, at_ms, pair.deadline_ms, True))
            else:
                known.deadline_ms = min(known.deadline_ms, pair.deadline_ms)

    def _judge(self, due: Return, end_ms: int) -> Iterator[str]:
        self.counted += 1
        late_ms = self._late_ms(due, end_ms)
        self.latest_ms = max(self.latest_ms, late_ms)
        if late_ms > self._allowed_ms(due):
            what = "lent" if due.lent else "reclaimed"
            yield f"{due.process[0]} #{due.process[1]} holds {what} GPUs {late_ms} ms after its deadline"

    def _late_ms(self, due: Return, end_ms: int) -> int:
        helpers = [f"node_agent-{due.node}", due.node, "", *self._controllers(due)]
        return end_ms - due.deadline_ms - self.history.excused_ms(helpers, min(due.asked_ms, due.deadline_ms), end_ms)

    def _allowed_ms(self, due: Return) -> int:
        return TOLERANCE_MS + (RETRIES * self.job.timeouts.command_retry_ms if due.lent else 0)

    def _controllers(self, due: Return) -> list[str]:
        if not due.lent:
            return []
        names = ("toggle_manager", "orchestrator", "elastic_scheduler", "decision_engine")
        return sorted(actor for actor in self.history.known_actors() if actor.startswith(names))


class Liveness(Promise):
    """Once faults stop, the cluster reaches its newest target within a bounded time, and all work is finished."""

    name = "liveness"
    kinds = (Stored, TableWritten, FaultsStopped, RunEnded)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        times = self.job.timeouts
        self.bound_ms = (
            BACKOFF_MOST_MS + 2 * (2 * times.prepare_ms + 2 * times.apply_ms) + times.lease_ms + times.return_ms
        )
        self._since: int | None = None
        self._decision = ""
        self._told = False

    def see(self, seen: Seen) -> Iterator[str]:
        stopped = self.history.faults_stopped_ms
        if isinstance(seen, RunEnded) and not seen.finished:
            after = "" if stopped is None else f", {seen.at_ms - stopped} ms after the last fault"
            yield f"the run ended with work unfinished{after}: {self._where()}"
        if stopped is None or self._told:
            return
        decision = "" if self.history.target is None else self.history.target.decision_id
        if self._is_settled():
            self._since = None
        elif self._since is None or decision != self._decision:
            self._since = seen.at_ms
        self._decision = decision
        if self._since is not None and seen.at_ms - self._since > self.bound_ms:
            self._told = True
            yield f"target {decision} is not reached {seen.at_ms - self._since} ms after it was set: {self._where()}"

    def _is_settled(self) -> bool:
        table, target = self.history.table, self.history.target
        if table is None or target is None:
            return False
        if table.plan is not None or table.training_batch != target.training_batch:
            return False
        if any(row.activity is Activity.TRANSITIONING for row in table.rows):
            return False
        return self._held() == (target.prefill, target.decode, target.colocated)

    def _held(self) -> tuple[int, int, int]:
        rows = self.history.rows.values()
        held = [row.role.value for row in rows if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING]
        return held.count("prefill"), held.count("decode"), held.count("colocated")

    def _where(self) -> str:
        table, target = self.history.table, self.history.target
        if table is None or target is None:
            return "no table or no target"
        moving: list[WorkerId] = [row.worker for row in table.rows if row.activity is Activity.TRANSITIONING]
        plan = "no plan" if table.plan is None else f"plan {table.plan.plan_id} {table.plan.stage}"
        wanted = (target.prefill, target.decode, target.colocated)
        return (
            f"{self._held()} of {wanted} (prefill, decode, colocated), {plan}, {moving} in transition, "
            f"training batch {table.training_batch} of {target.training_batch}"
        )
