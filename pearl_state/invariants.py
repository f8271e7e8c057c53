"""What must hold of every role table, and of every step from one epoch to the next (DESIGN 3 and 11). Pure.

The orchestrator asserts both before each write, the simulator checks them after each event. A violation is a line
that names the rows; an empty result means that all hold.
"""

from __future__ import annotations

import itertools

from messages.ids import Activity, Residency, Role, Stage, WorkerId, Zone
from pearl_state.model import (
    DEDICATED_ZONES,
    LEGAL_CONDITIONS,
    NO_VERSION,
    OVERLAP_RESIDENCIES,
    RESIDENCY_TRANSITIONS,
    ROLLOUT_ROLES,
    RoleTable,
    Row,
    active_roles,
    servable,
    serves,
)
from pearl_state.plan import changes_of, first_wave


def violations(table: RoleTable) -> tuple[str, ...]:
    """Every invariant that a single table breaks."""
    found: list[str] = []
    _rows(table, found)
    _gpus(table, found)
    _pairs(table, found)
    _plan(table, found)
    _training(table, found)
    _serving(table, found)
    return tuple(found)


def step_violations(old: RoleTable, new: RoleTable) -> tuple[str, ...]:
    """Every invariant that the step from one written epoch to the next breaks (of the new table alone too)."""
    found = list(violations(new))
    if new.job != old.job:
        found.append(f"the job changed from {old.job} to {new.job}")
    if new.epoch != old.epoch + 1:
        found.append(f"epoch {new.epoch} follows epoch {old.epoch}: it must be one more")
    if new.policy_version < old.policy_version:
        found.append(f"policy version fell from {old.policy_version} to {new.policy_version}")
    for name in ("cursor", "plans", "target_seq", "failed_plans"):
        if getattr(new.writer, name) < getattr(old.writer, name):
            found.append(f"writer.{name} fell from {getattr(old.writer, name)} to {getattr(new.writer, name)}")
    before, after = old.by_worker, new.by_worker
    for worker, row in before.items():
        if worker not in after:
            found.append(f"{worker} has no row any more: slots are stable")
            continue
        _row_step(row, after[worker], found)
    pairs = {pair.overlap: pair.residency for pair in old.pairs}
    for pair in new.pairs:
        was = pairs.get(pair.overlap, pair.residency)
        if was is not pair.residency and not _reachable(was, pair.residency):
            found.append(f"residency of {pair.overlap} and {pair.training} went from {was} to {pair.residency}")
    _serving_step(old, new, found)
    return tuple(found)


def _rows(table: RoleTable, found: list[str]) -> None:
    workers = [row.worker for row in table.rows]
    if any(left >= right for left, right in itertools.pairwise(workers)):
        found.append("rows are not sorted by worker, each worker once")
    for row in table.rows:
        trains = row.zone is Zone.TRAINING
        if row.zone is Zone.UNKNOWN or Activity.UNKNOWN is row.activity or row.stage is Stage.UNKNOWN:
            found.append(f"{row.worker}: an unknown zone, activity or stage")
        elif (row.activity, row.stage) not in LEGAL_CONDITIONS:
            found.append(f"{row.worker}: activity {row.activity} does not go with stage {row.stage}")
        elif trains and row.activity is Activity.TRANSITIONING:
            found.append(f"{row.worker}: a training row is active or inactive, never transitioning")
        if trains is not (row.role is Role.TRAINING) or (not trains and row.role not in ROLLOUT_ROLES):
            found.append(f"{row.worker}: role {row.role} does not go with zone {row.zone}")
        if row.activity is not Activity.INACTIVE and row.incarnation <= 0:
            found.append(f"{row.worker} is {row.activity} without ever having had a process")
        holds = row.activity is Activity.ACTIVE or row.stage in (Stage.PREPARED, Stage.DRAINING, Stage.SWITCHING)
        if holds and not trains and row.version < 0:
            found.append(f"{row.worker} is {row.activity}/{row.stage} without weights")


def _gpus(table: RoleTable, found: list[str]) -> None:
    """At most one phase per GPU: rows that share one are an overlap/training pair, and not both use it."""
    paired = {(pair.overlap, pair.training) for pair in table.pairs}
    holders: dict[tuple[str, int], list[Row]] = {}
    for row in table.rows:
        if not row.gpus:
            found.append(f"{row.worker} has no GPU")
        if len(set(row.gpus)) != len(row.gpus):
            found.append(f"{row.worker} lists a GPU twice")
        for gpu in row.gpus:
            holders.setdefault((gpu.node, gpu.index), []).append(row)
    told: set[tuple[WorkerId, WorkerId]] = set()
    for (node, index), rows in holders.items():
        for position, one in enumerate(rows):
            for other in rows[position + 1 :]:
                overlap, training = (one, other) if one.zone is Zone.OVERLAP else (other, one)
                if (overlap.worker, training.worker) in told:
                    continue
                told.add((overlap.worker, training.worker))
                if overlap.zone is not Zone.OVERLAP or training.zone is not Zone.TRAINING:
                    found.append(f"{one.worker} and {other.worker} share GPU {node}[{index}]")
                elif (overlap.worker, training.worker) not in paired:
                    found.append(
                        f"{overlap.worker} and {training.worker} share GPU {node}[{index}] without being a pair"
                    )
                elif _uses(overlap) and _uses(training):
                    found.append(f"{overlap.worker} and {training.worker} both use GPU {node}[{index}]")


def _uses(row: Row) -> bool:
    """Whether the row's phase may have device state on its GPUs by the row alone (launching: not before the pair says so)."""
    return row.activity is not Activity.INACTIVE and row.stage is not Stage.LAUNCHING


def _pairs(table: RoleTable, found: list[str]) -> None:
    rows = table.by_worker
    overlaps = [pair.overlap for pair in table.pairs]
    if len(set(overlaps)) != len(overlaps):
        found.append("an overlap worker is in two pairs")
    for row in table.rows:
        if row.zone is Zone.OVERLAP and row.worker not in overlaps:
            found.append(f"{row.worker} is an overlap worker without a pair")
    for pair in table.pairs:
        overlap, training = rows.get(pair.overlap), rows.get(pair.training)
        name = f"pair {pair.overlap}/{pair.training}"
        if (
            overlap is None
            or training is None
            or overlap.zone is not Zone.OVERLAP
            or training.zone is not Zone.TRAINING
        ):
            found.append(f"{name} is not of an overlap and a training row")
            continue
        if not set(overlap.gpus) <= set(training.gpus):
            found.append(f"{name}: the overlap worker's GPUs are not the trainer's")
        allowed = OVERLAP_RESIDENCIES.get((overlap.activity, overlap.stage), ())
        if pair.residency not in allowed:
            found.append(
                f"{name}: residency {pair.residency} while the overlap row is {overlap.activity}/{overlap.stage}"
            )
        if training.activity is Activity.ACTIVE and pair.residency is not Residency.TRAINING:
            found.append(f"{name}: training is active in residency {pair.residency}; its GPUs are not its own yet")


def _plan(table: RoleTable, found: list[str]) -> None:
    plan, rows = table.plan, table.by_worker
    if plan is None:
        if table.admission_paused is not None:
            found.append(f"admission is paused for plan {table.admission_paused}, which is not in progress")
        if table.writer.role_set:
            found.append("roles set are recorded without a plan")
        return
    if plan.stage not in ("preparing", "applying"):
        found.append(f"plan {plan.plan_id}: unknown stage {plan.stage!r}")
    if table.admission_paused not in (None, plan.plan_id):
        found.append(f"admission is paused for {table.admission_paused}, but plan {plan.plan_id} is in progress")
    if (table.admission_paused is not None) is not (plan.stage == "applying" and bool(plan.add)):
        found.append(f"plan {plan.plan_id}: admission is paused exactly while joiners are being admitted")
    if not (plan.add or plan.remove or plan.reassign):
        found.append(f"plan {plan.plan_id} changes nothing")
    named = [entry.worker for entry in (*plan.add, *plan.remove, *plan.reassign)]
    if len(set(named)) != len(named):
        found.append(f"plan {plan.plan_id} names a worker twice")
    if unknown := sorted(worker for worker in named if worker not in rows):
        found.append(f"plan {plan.plan_id} names {', '.join(unknown)}, not in the table")
        return
    if plan.stage == "preparing" and not plan.add:
        found.append(f"plan {plan.plan_id} is preparing nobody")
    for assign in plan.add:
        row = rows[assign.worker]
        if row.stage not in (Stage.LAUNCHING, Stage.PREPARED) or row.incarnation != assign.incarnation:
            found.append(
                f"plan {plan.plan_id} adds {row.worker}, which is {row.activity}/{row.stage} #{row.incarnation}"
            )
        if plan.stage == "applying" and row.stage is not Stage.PREPARED:
            found.append(f"plan {plan.plan_id} is applying, but its joiner {row.worker} is not prepared")
    for assign in (*plan.add, *plan.reassign):
        if assign.role not in ROLLOUT_ROLES:
            found.append(f"plan {plan.plan_id} gives {assign.worker} role {assign.role}")
        gone = rows[assign.worker].activity is Activity.INACTIVE  # reassigned, and died since the cut: never admitted
        dead = gone and assign in plan.reassign
        if not dead and assign.role_generation <= rows[assign.worker].role_generation:
            found.append(f"plan {plan.plan_id} admits {assign.worker} with a generation that it has had")
    if plan.stage == "applying":
        for worker in (*(leave.worker for leave in plan.remove), *(assign.worker for assign in plan.reassign)):
            if rows[worker].activity is Activity.ACTIVE:
                found.append(f"plan {plan.plan_id} is applying, but {worker} is still routed")


def _training(table: RoleTable, found: list[str]) -> None:
    for row in table.rows:
        if row.zone is Zone.TRAINING and (row.activity is Activity.ACTIVE) is not (table.training_batch is not None):
            found.append(f"{row.worker} is {row.activity} while the training batch is {table.training_batch}")


def _serving(table: RoleTable, found: list[str]) -> None:
    """Some topology serves, unless the target is zero, nobody is left, or a plan is on its way to one."""
    target = table.writer.target
    zero = target is None or target.prefill + target.decode + target.colocated == 0
    roles = active_roles(table)
    if roles and not zero and table.plan is None and not serves(roles.values()):
        held = ", ".join(sorted(role.value for role in roles.values()))
        found.append(f"no topology serves ({held}), and no plan is on its way to one")


def _row_step(old: Row, new: Row, found: list[str]) -> None:
    name = old.worker
    if (old.gpus, old.zone) != (new.gpus, new.zone):
        found.append(f"{name}: a slot's GPUs and zone never change")
    if new.incarnation < old.incarnation:
        found.append(f"{name}: incarnation fell from {old.incarnation} to {new.incarnation}")
    if new.role_generation < old.role_generation:
        found.append(f"{name}: role generation fell from {old.role_generation} to {new.role_generation}")
    same_process = new.incarnation == old.incarnation
    restores = new.zone is Zone.OVERLAP and new.stage is Stage.LAUNCHING and new.version == NO_VERSION
    if same_process and new.version < old.version and not restores:
        found.append(f"{name}: policy version fell from {old.version} to {new.version} in one process")
    stays = old.activity is Activity.ACTIVE and new.activity is Activity.ACTIVE and same_process
    if stays and old.role is not new.role:
        found.append(f"{name}: serves as {old.role}, then as {new.role}, without having been cut")
    if stays and old.role_generation != new.role_generation and old.zone is not Zone.TRAINING:
        found.append(f"{name}: role generation changed although nothing else did; its requests would be disturbed")
    if new.zone in (*DEDICATED_ZONES, Zone.OVERLAP) and new.activity is Activity.ACTIVE:
        if old.activity is Activity.INACTIVE:
            found.append(f"{name}: became active without having been prepared")
        elif old.activity is Activity.TRANSITIONING and new.role_generation <= old.role_generation:
            found.append(f"{name}: was admitted without a new role generation")


def _serving_step(old: RoleTable, new: RoleTable, found: list[str]) -> None:
    """A cut does not stop all serving where a wave could have avoided it."""
    cut_now = new.plan is not None and new.plan.stage == "applying"
    cut_before = old.plan is not None and old.plan.stage == "applying" and new.plan is not None
    cut_before = cut_before and old.plan is not None and new.plan is not None and old.plan.plan_id == new.plan.plan_id
    target = new.writer.target
    if not cut_now or cut_before or target is None or not servable(old) or servable(new):
        return
    assert new.plan is not None
    if target.prefill + target.decode + target.colocated == 0:
        return
    rows, before = new.by_worker, old.by_worker
    lost = any(
        row.activity is Activity.ACTIVE and rows[worker].activity is Activity.INACTIVE for worker, row in before.items()
    )
    if lost:
        return
    plan = changes_of(new.plan)
    mandatory = frozenset(leave.worker for leave in target.leaving)
    if first_wave(old.rows, plan, mandatory) != plan:
        found.append(f"plan {plan} cuts all serving workers at once, although a wave could have served on")


def _reachable(start: Residency, end: Residency) -> bool:
    """Whether legal steps lead from one residency to another (an epoch may carry several)."""
    seen, frontier = {start}, {start}
    while frontier:
        frontier = {after for before, after in RESIDENCY_TRANSITIONS if before in frontier} - seen
        if end in frontier:
            return True
        seen |= frontier
    return False


def check(old: RoleTable | None, new: RoleTable) -> None:
    """Assert that the new table, and the step to it, break nothing. `old` None: the first table of a job."""
    broken = violations(new) if old is None else step_violations(old, new)
    assert not broken, f"epoch {new.epoch} of the role table breaks: {'; '.join(broken)}"
