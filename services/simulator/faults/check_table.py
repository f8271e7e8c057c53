"""Promises about the role table (DESIGN 3, 11.1 to 11.3): its writer, who uses a GPU, who is visible, who serves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from messages.ids import Activity, Residency, Role, Stage, Zone
from pearl_state.model import PlanRecord, RoleTable, Row
from services.simulator.faults.history import History, Process, Promise
from services.simulator.faults.record import MemoryHeld, ProcessBegan, Seen, TableSeen, TableWritten


class SingleWriter(Promise):
    """One orchestrator writes at a time, each on what the one before it wrote; nothing that only rises ever falls.

    Who is deposed may stand by and take over again (DESIGN 3): what shows a second writer is a write that does not follow
    from the last one.
    """

    name = "11.1 single writer"
    kinds = (TableWritten,)

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableWritten)
        old, new = self.history.before, seen.table
        if old is None:
            return
        if new.epoch <= old.epoch:
            yield f"epoch {new.epoch} of {seen.writer} follows epoch {old.epoch}"
        elif new.epoch != old.epoch + 1:
            yield f"epoch {new.epoch} of {seen.writer} follows epoch {old.epoch}: one between was lost"
        yield from self._fallen(old, new)

    def _fallen(self, old: RoleTable, new: RoleTable) -> Iterator[str]:
        if new.policy_version < old.policy_version:
            yield f"epoch {new.epoch}: policy version {new.policy_version} follows {old.policy_version}"
        if new.writer.cursor < old.writer.cursor or new.writer.plans < old.writer.plans:
            yield f"epoch {new.epoch}: what the writer has accounted for falls; an update was lost"
        for worker, row in self.history.rows_before.items():
            now = self.history.rows.get(worker)
            if now is None or (now.gpus, now.zone) != (row.gpus, row.zone):
                yield f"epoch {new.epoch}: slot {worker} is gone, or has other GPUs or another zone"
            elif now.incarnation < row.incarnation or now.role_generation < row.role_generation:
                yield f"epoch {new.epoch}: incarnation or generation of {worker} falls"


class NoStepBack(Promise):
    """No watcher ever goes by an older table than it did, nor by one that was never written."""

    name = "11.1 watchers only go forward"
    kinds = (TableSeen,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._epochs: dict[tuple[str, int], int] = {}

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableSeen)
        key = (seen.actor, seen.life)
        before = self._epochs.get(key, seen.epoch)
        if seen.epoch < before:
            yield f"{seen.actor} goes back from epoch {before} to {seen.epoch}"
        if seen.epoch not in self.history.tables:
            yield f"{seen.actor} goes by epoch {seen.epoch}, which was never written"
        self._epochs[key] = seen.epoch


class OnePhase(Promise):
    """No GPU is used by two processes at once, by the memory they hold and by the rows; training finds its GPUs free."""

    name = "11.2 one phase per GPU"
    kinds = (MemoryHeld, ProcessBegan, TableWritten)

    def see(self, seen: Seen) -> Iterator[str]:
        match seen:
            case ProcessBegan() | MemoryHeld():
                process = (seen.worker, seen.incarnation)
                if self.history.holds(process):
                    yield from self._conflicts(process, seen.node, seen.gpus)
            case TableWritten():
                yield from self._by_rows(seen.table)
            case _:
                pass

    def _conflicts(self, process: Process, node: str, gpus: Sequence[int]) -> Iterator[str]:
        for gpu in gpus:
            for other in sorted(self.history.holders.get((node, gpu), set()) - {process}):
                yield f"GPU {node}[{gpu}] is held by {_name(process)} and by {_name(other)}"

    def _by_rows(self, table: RoleTable) -> Iterator[str]:
        users: dict[tuple[str, int], str] = {}
        for row in table.rows:
            if not self._uses(row):
                continue
            for gpu in row.gpus:
                other = users.setdefault((gpu.node, gpu.index), row.worker)
                if other != row.worker:
                    yield f"epoch {table.epoch}: {other} and {row.worker} both use GPU {gpu.node}[{gpu.index}]"
        for row in table.rows:
            was = self.history.rows_before.get(row.worker)
            begins = was is not None and was.activity is not Activity.ACTIVE and row.activity is Activity.ACTIVE
            if row.zone is Zone.TRAINING and begins:
                yield from self._not_free(table, row)

    def _not_free(self, table: RoleTable, training: Row) -> Iterator[str]:
        for gpu in training.gpus:
            for holder in sorted(self.history.holders.get((gpu.node, gpu.index), set())):
                row = self.history.rows.get(holder[0])
                if row is not None and row.zone is Zone.OVERLAP:
                    yield f"epoch {table.epoch} gives training GPU {gpu.node}[{gpu.index}], which {_name(holder)} holds"

    def _uses(self, row: Row) -> bool:
        if row.activity is Activity.ACTIVE or row.stage in (Stage.PREPARED, Stage.DRAINING, Stage.SWITCHING):
            return True
        return row.zone is Zone.OVERLAP and self.history.residency(row.worker) in (
            Residency.ACTIVATING,
            Residency.ROLLOUT,
            Residency.DRAINING,
        )


def _name(process: Process) -> str:
    return f"{process[0]} #{process[1]}"


class HalfReady(Promise):
    """A worker becomes visible only as a whole: up, at the current version, its role taken, with all of its group."""

    name = "11.3 no half-ready worker is visible"
    kinds = (TableWritten,)

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableWritten)
        table, history = seen.table, self.history
        for row in table.rows:
            was = history.rows_before.get(row.worker)
            if row.zone is Zone.TRAINING or row.activity is not Activity.ACTIVE:
                continue
            if was is not None and was.activity is Activity.ACTIVE and was.incarnation == row.incarnation:
                continue
            for lack in self._lacks(row, was, table):
                yield f"epoch {table.epoch} admits {row.worker} #{row.incarnation}, {lack}"
        if history.before is not None and history.before.plan is not None:
            yield from self._group(history.before.plan, table)

    def _lacks(self, row: Row, was: Row | None, table: RoleTable) -> Iterator[str]:
        process, history = (row.worker, row.incarnation), self.history
        if process not in history.ready:
            yield "which never said that it is up"
        if history.applied.get(process, -1) < row.version:
            yield f"at version {row.version}, which it never said to have"
        joins = was is None or was.stage is not Stage.SWITCHING
        if joins and row.version < table.policy_version:
            yield f"at version {row.version}, when {table.policy_version} is current"
        if (row.worker, row.incarnation, row.role_generation, row.role) not in history.role_set:
            yield f"which never took role {row.role} of generation {row.role_generation}"
        if was is not None and was.role_generation >= row.role_generation:
            yield f"under generation {row.role_generation}, which it had before"
        if process in history.alive and not history.holds(process):
            yield "which holds no device memory"

    def _group(self, plan: PlanRecord, table: RoleTable) -> Iterator[str]:
        rows = self.history.rows
        joined = [
            assign.worker
            for assign in plan.add
            if (row := rows.get(assign.worker)) is not None
            and row.activity is Activity.ACTIVE
            and row.incarnation == assign.incarnation
        ]
        if not joined:
            return
        target = table.writer.target
        returning = target is not None and target.training_batch is not None
        for assign in plan.add:
            row = rows.get(assign.worker)
            if row is None or assign.worker in joined or (row.zone is Zone.OVERLAP and returning):
                continue
            # Admitted and cut again by the next plan, in one write.
            if row.stage in (Stage.DRAINING, Stage.SWITCHING) and row.role_generation > assign.role_generation:
                continue
            yield f"epoch {table.epoch} admits {joined[0]} without {assign.worker}, of the same plan {plan.plan_id}"


class Servable(Promise):
    """Some topology serves unless the budget is zero; a gap is allowed only where no order of changes avoids it."""

    name = "11.3 some topology serves"
    kinds = (TableWritten,)

    def see(self, seen: Seen) -> Iterator[str]:
        assert isinstance(seen, TableWritten)
        table, old = seen.table, self.history.before
        target = table.writer.target
        if target is None or target.prefill + target.decode + target.colocated == 0:
            return
        now = _active(self.history.rows)
        if now and table.plan is None and not _serve(now.values()):
            roles = ", ".join(sorted(role.value for role in now.values()))
            yield f"epoch {table.epoch}: only {roles} active, and no plan is on its way to a topology that serves"
        before = _active(self.history.rows_before)
        if old is None or table.plan is None or not _serve(before.values()) or _serve(now.values()):
            return
        lost = any(self.history.rows[worker].activity is Activity.INACTIVE for worker in before)
        if lost:
            return
        must: set[str] = {leave.worker for leave in target.leaving}
        if target.training_batch is not None:
            must |= {row.worker for row in table.rows if row.zone is Zone.OVERLAP}
        if self._avoidable(before, table.plan, must):
            yield f"epoch {table.epoch}: plan {table.plan.plan_id} stops all serving, which two waves would not"

    def _avoidable(self, before: dict[str, Role], plan: PlanRecord, must: set[str]) -> bool:
        """Whether some workers could have kept their roles until the others have their new ones.

        Both halves must serve: those that wait, with those that the plan does not touch; and the others afterwards.
        """
        cut = {leave.worker for leave in plan.remove} | {assign.worker for assign in plan.reassign}
        stay = [role for worker, role in before.items() if worker not in cut]
        new = {assign.worker: assign.role for assign in plan.reassign}
        joiners = [assign.role for assign in plan.add]
        may_wait = sorted(worker for worker in cut if worker in before and worker not in must)
        for size in (1, 2):
            for waiting in itertools.combinations(may_wait, size):
                meanwhile = [*stay, *(before[worker] for worker in waiting)]
                after = [*stay, *joiners, *(role for worker, role in new.items() if worker not in waiting)]
                if _serve(meanwhile) and _serve(after):
                    return True
        return False


def _active(rows: dict[str, Row]) -> dict[str, Role]:
    return {
        worker: row.role
        for worker, row in rows.items()
        if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING
    }


def _serve(roles: Iterable[Role]) -> bool:
    """A colocated worker, or at least one prefill and one decode worker (DESIGN 3)."""
    held = set(roles)
    return Role.COLOCATED in held or (Role.PREFILL in held and Role.DECODE in held)
