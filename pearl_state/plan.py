"""Minimal-change plans (paper 4.4.2, eq. 5-6): from a table and a target to `(W_add, W_remove, rho)`. Pure.

Which workers join and leave is fixed by the target's active set; among the survivors each role keeps as many workers
as it has and may have, and the excess is reassigned. Nothing can do with fewer changes. Where several plans are
minimal, ties are broken for locality, always in the same way:

- whole nodes leave first, lent GPUs before preemptible before reserved, and of each the largest that may leave; of what
  is left, likewise lent before preemptible before reserved, then workers of the smallest nodes, and of one node prefix-warm
  decode workers stay longest; among equals, the later name leaves;
- workers that are already preparing are taken before slots that would have to start, in the opposite order;
- a joiner takes the role its slot had (so a group keeps its roles when it is planned again).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from messages.ids import Activity, Role, Stage, WorkerId, Zone
from pearl_state.model import ROLLOUT_ROLES, PlanRecord, Row, serves


class Counts(msgspec.Struct, frozen=True):
    """How many workers each role is to have."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def total(self) -> int:
        """Size of the target active set."""
        return self.prefill + self.decode + self.colocated

    def of(self, role: Role) -> int:
        """The count of one role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}.get(role, 0)

    @property
    def servable(self) -> bool:
        """Whether workers in these numbers can serve a request."""
        return serves(role for role in ROLLOUT_ROLES if self.of(role))


class Placement(msgspec.Struct, frozen=True):
    """One worker and the role it is to have."""

    worker: WorkerId
    role: Role


class MinimalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`(W_add, W_remove, rho)`, each sorted by worker. `d_worker` and `d_role` are eq. 5 and eq. 6."""

    add: tuple[Placement, ...] = ()
    remove: tuple[WorkerId, ...] = ()
    reassign: tuple[Placement, ...] = ()

    @property
    def d_worker(self) -> int:
        """Membership changes, eq. 5."""
        return len(self.add) + len(self.remove)

    @property
    def d_role(self) -> int:
        """Role changes among survivors, eq. 6."""
        return len(self.reassign)

    @property
    def empty(self) -> bool:
        """Nothing to do: the target is reached."""
        return not (self.add or self.remove or self.reassign)


def changes_of(plan: PlanRecord) -> MinimalPlan:
    """What the plan in a table changes."""
    return MinimalPlan(
        add=tuple(Placement(assign.worker, assign.role) for assign in plan.add),
        remove=tuple(leave.worker for leave in plan.remove),
        reassign=tuple(Placement(assign.worker, assign.role) for assign in plan.reassign),
    )


def fit(counts: Counts, workers: int) -> Counts:
    """`counts` brought down to at most `workers`, in the same mode where that can serve, else colocated.

    This is the forced fallback: it applies when slots of the target cannot be had, or when the target's counts could
    not serve by themselves (prefill without decode).
    """
    workers = min(workers, counts.total)
    if counts.total == workers and counts.servable:
        return counts
    if counts.colocated == 0 and counts.servable and workers >= 2:
        prefill = max(1, min(workers - 1, counts.prefill * workers // counts.total))
        return Counts(prefill=prefill, decode=workers - prefill)
    if counts.prefill and counts.decode and counts.colocated and workers >= 3:
        # Mixed targets do not come from the decision engine; keep both modes, colocated gives way.
        colocated = max(1, min(counts.colocated, workers - counts.prefill - counts.decode))
        rest = fit(Counts(counts.prefill, counts.decode), workers - colocated)
        return Counts(rest.prefill, rest.decode, workers - rest.prefill - rest.decode)
    return Counts(colocated=workers)


def node_of_row(row: Row) -> str:
    """The node a row's GPUs are on ("" for a row without GPUs)."""
    return row.gpus[0].node if row.gpus else ""


def choose_members(rows: Sequence[Row], usable: Collection[WorkerId], counts: Counts) -> tuple[WorkerId, ...]:
    """The target active set W': `counts.total` of `usable`, so that D_worker + D_role is least. Sorted.

    Workers that serve (or are changing role) are kept before any other is taken; if there are more of them than
    wanted, those of surplus roles leave, whole nodes first. `usable` must hold enough known workers.
    """
    candidates = [row for row in rows if row.worker in usable]
    assert len(candidates) >= counts.total, f"{counts.total} workers wanted of {len(candidates)} usable slots"
    serving = [row for row in candidates if row.activity is Activity.ACTIVE]
    switching = [row for row in candidates if row.stage is Stage.SWITCHING]
    others = [row for row in candidates if row.activity is not Activity.ACTIVE and row.stage is not Stage.SWITCHING]
    if len(serving) > counts.total:
        leavers = _choose_leavers(serving, len(serving) - counts.total, counts)
        return tuple(sorted(row.worker for row in serving if row.worker not in leavers))
    members = [row.worker for row in serving]
    members += [row.worker for row in sorted(switching, key=_reserved_first)][: counts.total - len(members)]
    per_node = Counter(node_of_row(row) for row in others)
    members += [
        row.worker
        for row in sorted(
            others,
            key=lambda row: (_readiness(row), *_reserved_first(row)[:1], -per_node[node_of_row(row)], row.worker),
        )
    ][: counts.total - len(members)]
    return tuple(sorted(members))


def minimal_change(rows: Sequence[Row], members: Collection[WorkerId], counts: Counts) -> MinimalPlan:
    """The plan from the rows' active set to `members` in the roles of `counts` (eq. 5-6).

    Rows left `draining` by an unfinished plan are leavers here, rows left `switching` are survivors that need a role.
    `counts.total` must be the number of members.
    """
    wanted = frozenset(members)
    assert counts.total == len(wanted), f"{counts.total} roles for {len(wanted)} workers"
    remove = [
        row.worker
        for row in rows
        if (row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING and row.worker not in wanted)
        or row.stage is Stage.DRAINING
        or (row.stage is Stage.SWITCHING and row.worker not in wanted)
    ]
    inside = [row for row in rows if row.worker in wanted]
    assert len(inside) == len(wanted), "a member of the target is not in the table"
    deficits = {role: counts.of(role) for role in ROLLOUT_ROLES}
    movers: list[Row] = []
    for role in ROLLOUT_ROLES:
        holders = sorted(
            (row for row in inside if row.activity is Activity.ACTIVE and row.role is role), key=_reserved_first
        )
        keep = min(len(holders), deficits[role])
        deficits[role] -= keep
        movers += holders[keep:]
    movers += [row for row in inside if row.stage is Stage.SWITCHING]
    joiners = [row for row in inside if row.activity is not Activity.ACTIVE and row.stage is not Stage.SWITCHING]
    add: list[Placement] = []
    for row in list(joiners):
        if deficits.get(row.role, 0) > 0:
            deficits[row.role] -= 1
            add.append(Placement(row.worker, row.role))
            joiners.remove(row)
    takers = [*sorted(movers, key=_reserved_first), *sorted(joiners, key=_reserved_first)]
    roles = [role for role in ROLLOUT_ROLES for _ in range(deficits[role])]
    assert len(roles) == len(takers), "every remaining role has a taker"
    placed = [Placement(row.worker, role) for row, role in zip(takers, roles, strict=True)]
    add += placed[len(movers) :]
    return MinimalPlan(
        add=tuple(sorted(add, key=_worker)),
        remove=tuple(sorted(remove)),
        reassign=tuple(sorted(placed[: len(movers)], key=_worker)),
    )


def first_wave(rows: Sequence[Row], plan: MinimalPlan, mandatory: Collection[WorkerId]) -> MinimalPlan:
    """The part of the plan that can be cut at once while some topology goes on serving; the rest is planned again.

    A mode switch of all workers would leave nobody between its cut and its admit epoch. So an *anchor* (a colocated
    worker, or a prefill and a decode worker) keeps its role until the others have theirs. The waves together make the
    same changes as the plan. Where no anchor exists (two colocated workers becoming one prefill and one decode; a
    mandatory return), the whole plan is one wave and requests wait for its apply section.
    """
    active = {row.worker: row.role for row in rows if row.activity is Activity.ACTIVE and row.zone is not Zone.TRAINING}
    new_roles = {placement.worker: placement.role for placement in plan.reassign}
    cut = new_roles.keys() | set(plan.remove)
    staying = {worker: role for worker, role in active.items() if worker not in cut}
    could_stay = [role for worker, role in active.items() if worker not in mandatory]
    if serves(staying.values()) or not serves(could_stay):
        return plan
    deferrable = sorted(worker for worker in cut if worker in active and worker not in mandatory)
    for anchor in _anchors(deferrable, active, new_roles, staying):
        after = [
            *staying.values(),
            *(role for worker, role in new_roles.items() if worker not in anchor),
            *(placement.role for placement in plan.add),
        ]
        if serves(after):
            return MinimalPlan(
                add=plan.add,
                remove=tuple(worker for worker in plan.remove if worker not in anchor),
                reassign=tuple(placement for placement in plan.reassign if placement.worker not in anchor),
            )
    return plan


def _anchors(
    deferrable: Sequence[WorkerId],
    active: Mapping[WorkerId, Role],
    new_roles: Mapping[WorkerId, Role],
    staying: Mapping[WorkerId, Role],
) -> list[tuple[WorkerId, ...]]:
    """Smallest sets of deferrable workers that serve together with those that stay; one for each kind of change."""
    kinds: dict[tuple[Role, Role | None], WorkerId] = {}
    for worker in deferrable:
        kinds.setdefault((active[worker], new_roles.get(worker)), worker)
    held = {role: [worker for (was, _), worker in kinds.items() if was is role] for role in ROLLOUT_ROLES}
    anchors: list[tuple[WorkerId, ...]] = [(worker,) for worker in held[Role.COLOCATED]]
    prefills: list[tuple[WorkerId, ...]] = [(worker,) for worker in held[Role.PREFILL]]
    decodes: list[tuple[WorkerId, ...]] = [(worker,) for worker in held[Role.DECODE]]
    if Role.PREFILL in staying.values():
        prefills = [()]
    if Role.DECODE in staying.values():
        decodes = [()]
    return anchors + [(*prefill, *decode) for prefill in prefills for decode in decodes]


def _choose_leavers(serving: Sequence[Row], leaving: int, counts: Counts) -> frozenset[WorkerId]:
    """Which of too many serving workers go: only of surplus roles, so that no survivor need change for it."""
    surplus = Counter({role: sum(row.role is role for row in serving) - counts.of(role) for role in ROLLOUT_ROLES})
    gone: set[WorkerId] = set()

    def go(rows: Iterable[Row]) -> None:
        for row in rows:
            gone.add(row.worker)
            surplus[row.role] -= 1

    nodes: dict[str, list[Row]] = {}
    for row in serving:
        nodes.setdefault(node_of_row(row), []).append(row)
    by_size = sorted(nodes.items(), key=lambda item: (-len(item[1]), item[0]))
    # Stable: reserved nodes last, larger nodes first, later names first among equals.
    by_size = sorted(reversed(by_size), key=lambda item: (-_rank(item[1][0]), -len(item[1])))
    for _, here in by_size:
        roles = Counter(row.role for row in here)
        if len(here) <= leaving - len(gone) and all(surplus[role] >= count for role, count in roles.items()):
            go(here)
    rest = sorted((row for row in serving if row.worker not in gone), key=lambda row: row.worker, reverse=True)
    sizes = Counter(node_of_row(row) for row in rest)
    rest.sort(key=lambda row: (-_rank(row), sizes[node_of_row(row)], row.role is Role.DECODE))
    for row in rest:
        if len(gone) < leaving and surplus[row.role] > 0:
            go([row])
    assert len(gone) == leaving, "the surplus is at least what must leave"
    return frozenset(gone)


def _rank(row: Row) -> int:
    """How surely the worker's GPUs stay: reserved ones first, then preemptible, then lent ones."""
    return {Zone.RESERVED: 0, Zone.PREEMPTIBLE: 1}.get(row.zone, 2)


def _reserved_first(row: Row) -> tuple[int, WorkerId]:
    return _rank(row), row.worker


def _readiness(row: Row) -> int:
    """Prepared before launching before empty slots: what is nearest to serving is taken first."""
    return {Stage.PREPARED: 0, Stage.LAUNCHING: 1}.get(row.stage, 2)


def _worker(placement: Placement) -> WorkerId:
    return placement.worker
