"""Promises about plans (DESIGN 4, 6, 11.6, 11.8): as few changes as can be, nobody else touched, failure without a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from messages.ids import Activity, Residency, Role, Stage, Zone
from messages.node_agent import Kill, Launch
from messages.orchestrator import TargetConfiguration
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from pearl_state.model import PlanRecord, RoleTable, Row
from services.simulator.faults.history import History, Process, Promise
from services.simulator.faults.record import Seen, Sent, TableWritten

LARGEST = 6
"""Workers of a plan up to which every placement is tried."""
_ROLES: tuple[Role, ...] = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
_Kind = tuple[Role | None, bool]
"""A worker before a plan: its role (None: it serves nothing), and whether it must get a role anew (it was cut before)."""


class MinimalPlan(Promise):
    """A plan reaches its role counts with the fewest membership and role changes (eq. 5 and 6), of all placements.

    Tried on every placement of its counts on the workers that it could have used: those that serve and may go on doing
    so, and its own joiners (any other slot would cost as much). A plan that is one wave of several is held to what it
    reaches itself.
    """

    name = "11.6 plans are minimal"
    kinds = (TableWritten,)

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableWritten)
        table, old = seen.table, self.history.before
        plan = table.plan
        if plan is None or (old is not None and old.plan is not None and old.plan.plan_id == plan.plan_id):
            return
        target = table.writer.target
        if target is None:
            yield f"plan {plan.plan_id} without a target"
            return
        if plan.decision_id != target.decision_id:
            yield f"plan {plan.plan_id} is for {plan.decision_id}, the target is {target.decision_id}"
        yield from self._extra(table, plan, target)

    def _extra(self, table: RoleTable, plan: PlanRecord, target: TargetConfiguration) -> Iterator[str]:
        joins = {assign.worker: assign.role for assign in plan.add}
        moves = {assign.worker: assign.role for assign in plan.reassign}
        leaves = {leave.worker for leave in plan.remove}
        forced = {leave.worker for leave in target.leaving}
        kinds: list[_Kind] = []
        fixed_leaves, counts = 0, dict.fromkeys(_ROLES, 0)
        for row in table.rows:
            if row.zone is Zone.TRAINING:
                continue
            was = self._role_before(row)
            if row.worker in joins:
                kinds.append((None, False))
                counts[joins[row.worker]] += 1
                continue
            if was is None:
                if row.worker in moves or (row.worker in leaves and row.stage is not Stage.DRAINING):
                    yield f"plan {plan.plan_id} changes {row.worker}, which serves nothing"
                continue
            may_stay = row.worker in target.usable and row.worker not in forced
            may_stay = may_stay and not (row.zone is Zone.OVERLAP and target.training_batch is not None)
            role, cut = was
            if row.worker in leaves:
                fixed_leaves += not may_stay
                if may_stay:
                    kinds.append((role, cut))
            elif may_stay:
                kinds.append((role, cut))
                counts[moves.get(row.worker, role)] += 1
            elif row.worker in moves:
                yield f"plan {plan.plan_id} gives {row.worker} a new role, which the target does not have"
        if len(kinds) > LARGEST:
            return
        made = len(joins) + len(moves) + len(leaves & self._counted(table)) - fixed_leaves
        wanted = (counts[Role.PREFILL], counts[Role.DECODE], counts[Role.COLOCATED])
        least = fewest_changes(tuple(sorted(kinds, key=repr)), wanted)
        if made > least:
            yield f"plan {plan.plan_id} makes {made} changes where {least} would do"

    def _counted(self, table: RoleTable) -> set[str]:
        """Rows whose leaving is a change: those that served, or were cut to come back."""
        return {row.worker for row in table.rows if self._role_before(row) is not None}

    def _role_before(self, row: Row) -> tuple[Role, bool] | None:
        """What a rollout row serves as before the plan, and whether it was cut already; None: nothing.

        The table that shows a plan first may show its cut as well, so the row is read from the table before; what was lost
        since then serves nothing.
        """
        before = self.history.rows_before.get(row.worker, row)
        if row.activity is Activity.INACTIVE or before.incarnation != row.incarnation:
            return None
        if before.activity is Activity.ACTIVE:
            return before.role, False
        if before.stage is Stage.SWITCHING:
            return row.role, row.activity is not Activity.ACTIVE
        # Admitted by the plan that ended in this very write, and perhaps cut by the new one.
        admitted = row.activity is Activity.ACTIVE or row.stage in (Stage.DRAINING, Stage.SWITCHING)
        if before.stage is Stage.PREPARED and admitted:
            return row.role, False
        return None


@lru_cache(maxsize=65536)
def fewest_changes(kinds: tuple[_Kind, ...], counts: tuple[int, int, int]) -> int:
    """The least of D_worker + D_role over all ways to give these workers roles in these counts; a large number: none."""
    least = 1 << 30
    for placed in itertools.product((None, *_ROLES), repeat=len(kinds)):
        if (placed.count(Role.PREFILL), placed.count(Role.DECODE), placed.count(Role.COLOCATED)) != counts:
            continue
        changes = 0
        for (role, cut), new in zip(kinds, placed, strict=True):
            stays = role is not None and new is not None
            changes += (role is None) is not (new is None)
            changes += stays and (cut or new is not role)
        least = min(least, changes)
    return least


class Untouched(Promise):
    """Who is in no plan gets no command and changes in nothing; a command names what some table ordered."""

    name = "11.6 untouched workers see no command"
    kinds = (Sent, TableWritten)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._cut: set[tuple[str, int, int]] = set()  # (worker, incarnation, generation) of a cut, or of a return
        self._given: set[tuple[str, int, int, Role]] = set()  # roles that plans give
        self._lends: set[tuple[str, int]] = set()
        self._returns: set[tuple[str, int]] = set()
        self._launched: set[Process] = set()
        self._unwanted: set[Process] = set()

    def see(self, seen: Seen) -> Iterator[str]:
        if isinstance(seen, TableWritten):
            self._learn(seen.table)
            yield from self._steps(seen.table)
            return
        assert isinstance(seen, Sent)
        match seen.message:
            case Drain() as command:
                if (command.worker, command.incarnation, command.role_generation) not in self._cut:
                    yield f"{seen.sender} drains {command.worker}, which no table has cut under {command.role_generation}"
            case SetRole() as command:
                key = (command.worker, command.incarnation, command.role_generation, command.role)
                if key not in self._given:
                    yield f"{seen.sender} gives {command.worker} role {command.role}, which no plan gives it"
            case Activate() as command:
                if (command.worker, command.incarnation) not in self._lends:
                    yield f"{seen.sender} activates {command.worker}, which is lent nothing"
            case Deactivate() as command:
                if (command.worker, command.incarnation) not in self._returns:
                    yield f"{seen.sender} deactivates {command.worker}, which has nothing to return"
            case Launch() as command:
                row = self.history.rows.get(command.worker)
                dedicated = row is not None and row.zone not in (Zone.TRAINING, Zone.OVERLAP)
                if dedicated and (command.worker, command.incarnation) not in self._launched:
                    yield f"{seen.sender} launches {command.worker} #{command.incarnation}, which no table launches"
            case Kill() as command:
                yield from self._kill(seen.sender, command)
            case _:
                pass

    def _kill(self, sender: str, command: Kill) -> Iterator[str]:
        row = self.history.rows.get(command.worker)
        if row is None or row.zone is Zone.TRAINING or row.incarnation > command.incarnation:
            return
        if (command.worker, command.incarnation) not in self._unwanted:
            yield f"{sender} kills {command.worker} #{command.incarnation}, which every table wants"

    def _learn(self, table: RoleTable) -> None:
        for row in table.rows:
            process = (row.worker, row.incarnation)
            if row.stage in (Stage.DRAINING, Stage.SWITCHING):
                self._cut.add((row.worker, row.incarnation, row.role_generation))
                self._unwanted.add(process)
            elif row.stage in (Stage.LAUNCHING, Stage.PREPARED):
                self._launched.add(process)
            elif row.activity is Activity.INACTIVE:
                self._unwanted.add(process)
        for pair in table.pairs:
            row = self.history.rows[pair.overlap]
            if pair.residency is Residency.ACTIVATING:
                self._lends.add((row.worker, row.incarnation))
            elif pair.residency is Residency.DRAINING:
                self._returns.add((row.worker, row.incarnation))
                self._cut.add((row.worker, row.incarnation, row.role_generation))
        if table.plan is not None:
            for assign in (*table.plan.add, *table.plan.reassign):
                self._given.add((assign.worker, assign.incarnation, assign.role_generation, assign.role))

    def _steps(self, table: RoleTable) -> Iterator[str]:
        """Changes of rows that served: each has a plan, a return or an end as its reason."""
        plan = table.plan
        planned: set[str] = set()
        if plan is not None:
            planned = {entry.worker for entry in (*plan.remove, *plan.reassign)}
        target = table.writer.target
        returning = target is not None and target.training_batch is not None
        for worker, was in self.history.rows_before.items():
            row = self.history.rows.get(worker, was)
            if was.activity is not Activity.ACTIVE or was.zone is Zone.TRAINING:
                continue
            where = f"epoch {table.epoch}: {worker}, which served as {was.role}"
            if row.activity is Activity.ACTIVE:
                if (row.role, row.role_generation, row.incarnation) != (was.role, was.role_generation, was.incarnation):
                    yield f"{where}, changes role, generation or incarnation without having been cut"
            elif row.activity is Activity.INACTIVE or row.incarnation != was.incarnation:
                if not self._is_over(was):
                    yield f"{where}, is given up although it lives"
            elif worker not in planned and not (row.zone is Zone.OVERLAP and returning):
                yield f"{where}, is {row.stage} and in no plan"

    def _is_over(self, was: Row) -> bool:
        """Whether a process that served may be taken for gone: it is, or its node may have been silent for the lease."""
        process = (was.worker, was.incarnation)
        if process in self.history.gone or process in self.history.ended or process in self.history.released:
            return True
        return self.history.disturbed(was.worker, 3 * self.job.timeouts.lease_ms)


class FailedExpansion(Promise):
    """A plan that fails leaves the table as it was: its joiners were never visible, whoever it did not name is the same.

    And it fails for a cause: an executor said so, one of its workers is gone, or its time is over.
    """

    name = "11.8 a failed expansion leaves no trace"
    kinds = (TableWritten,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._at_start: dict[str, Row] = {}
        self._plan = ""

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableWritten)
        table, old = seen.table, self.history.before
        plan, was = table.plan, None if old is None else old.plan
        if was is not None and (plan is None or plan.plan_id != was.plan_id):
            assert old is not None
            if table.writer.failed_plans > old.writer.failed_plans and was.add:
                yield from self._rolled_back(table, was)
                if not self._has_cause(was, seen.at_ms):
                    yield f"epoch {table.epoch} rolls back plan {was.plan_id} without a cause"
        if plan is not None and plan.plan_id != self._plan:
            self._plan = plan.plan_id
            self._at_start = dict(self.history.rows_before)

    def _has_cause(self, plan: PlanRecord, at_ms: int) -> bool:
        if plan.plan_id in self.history.given_up or at_ms >= plan.deadline_ms:
            return True
        parts = [(assign.worker, int(assign.incarnation)) for assign in (*plan.add, *plan.reassign)]
        if any(process in self.history.gone or process in self.history.ended for process in parts):
            return True
        return any(self.history.disturbed(worker, 3 * self.job.timeouts.lease_ms) for worker, _ in parts)

    def _rolled_back(self, table: RoleTable, plan: PlanRecord) -> Iterator[str]:
        where, rows = f"epoch {table.epoch} rolls back plan {plan.plan_id}", self.history.rows
        for assign in plan.add:
            row = rows[assign.worker]
            if row.activity is Activity.ACTIVE and row.role_generation == assign.role_generation:
                yield f"{where}, and its joiner {row.worker} is active"
        if table.admission_paused == plan.plan_id:
            yield f"{where}, and admission stays paused for it"
        named = {entry.worker for entry in (*plan.add, *plan.reassign, *plan.remove)}
        following = table.plan
        if following is not None:
            named |= {entry.worker for entry in (*following.add, *following.reassign, *following.remove)}
        for worker, was in self._at_start.items():
            row = rows[worker]
            if worker in named or was.zone in (Zone.TRAINING, Zone.OVERLAP) or was.activity is not Activity.ACTIVE:
                continue
            same = (row.activity, row.role, row.role_generation, row.incarnation) == (
                was.activity,
                was.role,
                was.role_generation,
                was.incarnation,
            )
            lost = row.activity is Activity.INACTIVE or row.incarnation != was.incarnation
            if not same and not lost:  # that one which was lost had died is `Untouched`'s to judge
                yield f"{where}, and {worker}, which it did not name, is {row.activity} as {row.role}"
