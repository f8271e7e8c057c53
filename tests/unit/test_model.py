"""The role table's transitions and invariants: legal steps, and each violation named."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from messages.decision_engine import Leave
from messages.executors import Assign
from messages.ids import (
    Activity,
    DecisionId,
    Epoch,
    Gpu,
    Incarnation,
    NodeId,
    PlanId,
    PolicyVersion,
    Residency,
    Role,
    RoleGeneration,
    Stage,
    WorkerId,
    Zone,
)
from pearl_state.invariants import check, step_violations, violations
from pearl_state.model import (
    LEGAL_CONDITIONS,
    NO_VERSION,
    RESIDENCY_TRANSITIONS,
    ROW_TRANSITIONS,
    TRAINING_MOVES,
    IllegalTransition,
    Move,
    Pair,
    PlanRecord,
    RoleTable,
    Row,
    change,
    servable,
    serves,
    toggle,
    with_rows,
)
from tests.unit.fake_cluster import FakeCluster

replace = msgspec.structs.replace


def make(condition: tuple[Activity, Stage], zone: Zone = Zone.RESERVED) -> Row:
    return Row(
        worker=WorkerId("n-w0"),
        gpus=(Gpu(NodeId("n"), 0),),
        zone=zone,
        role=Role.TRAINING if zone is Zone.TRAINING else Role.DECODE,
        activity=condition[0],
        stage=condition[1],
        incarnation=Incarnation(3),
        role_generation=RoleGeneration(5),
        endpoint="tcp:1",
        version=PolicyVersion(2),
    )


@pytest.mark.parametrize(("move", "condition"), list(itertools.product(Move, LEGAL_CONDITIONS)))
def test_what_is_not_listed_raises_and_changes_nothing(move: Move, condition: tuple[Activity, Stage]):
    row = make(condition, Zone.TRAINING if move in TRAINING_MOVES else Zone.RESERVED)
    expected = ROW_TRANSITIONS.get((move, condition))
    if expected is None:
        with pytest.raises(IllegalTransition, match="n-w0"):
            change(row, move)
    else:
        after = change(row, move)
        assert (after.activity, after.stage) == expected
        assert after.role_generation >= row.role_generation and after.incarnation >= row.incarnation


def test_zones_keep_to_their_moves():
    with pytest.raises(IllegalTransition):
        change(make((Activity.INACTIVE, Stage.NONE)), Move.OCCUPY)
    with pytest.raises(IllegalTransition):
        change(make((Activity.INACTIVE, Stage.NONE), Zone.TRAINING), Move.LAUNCH)
    with pytest.raises(IllegalTransition):
        change(make((Activity.INACTIVE, Stage.NONE)), Move.LAUNCH, role=Role.TRAINING)


def test_launch_is_a_new_process_unless_an_overlap_worker_lives_on():
    row = change(make((Activity.INACTIVE, Stage.NONE)), Move.LAUNCH, role=Role.PREFILL)
    assert (row.incarnation, row.version, row.endpoint, row.role) == (4, NO_VERSION, "", Role.PREFILL)
    overlap = make((Activity.INACTIVE, Stage.NONE), Zone.OVERLAP)
    assert change(overlap, Move.LAUNCH, same_process=True).incarnation == 3
    with pytest.raises(IllegalTransition):
        change(make((Activity.INACTIVE, Stage.NONE)), Move.LAUNCH, same_process=True)


def test_an_idle_overlap_worker_that_died_is_wanted_again():
    idle = replace(make((Activity.INACTIVE, Stage.NONE), Zone.OVERLAP), ready=True)
    again = change(idle, Move.RESPAWN)
    assert (again.incarnation, again.activity, again.ready, again.version) == (4, Activity.INACTIVE, False, NO_VERSION)
    restored = change(idle, Move.LAUNCH, same_process=True)
    assert restored.ready and restored.version == NO_VERSION, "its device state is to be restored"
    for row in (make((Activity.INACTIVE, Stage.NONE)), make((Activity.ACTIVE, Stage.NONE), Zone.OVERLAP)):
        with pytest.raises(IllegalTransition):
            change(row, Move.RESPAWN)


def test_generations_rise_at_the_cut_and_never_fall():
    active = make((Activity.ACTIVE, Stage.NONE))
    cut = change(active, Move.SWITCH)
    assert cut.role_generation == 6
    assert change(cut, Move.ADMIT, role=Role.PREFILL, generation=RoleGeneration(7)).role_generation == 7
    with pytest.raises(IllegalTransition, match="cannot fall"):
        change(cut, Move.ADMIT, generation=RoleGeneration(4))


def test_residency_leads_through_free():
    pair = Pair(overlap=WorkerId("n-w0"), training=WorkerId("n-t0"))
    for step in (Residency.RELEASING, Residency.FREE, Residency.ACTIVATING, Residency.ROLLOUT, Residency.DRAINING):
        pair = toggle(pair, step)
    pair = toggle(toggle(pair, Residency.FREE), Residency.TRAINING)
    for residency in Residency:
        if (Residency.TRAINING, residency) not in RESIDENCY_TRANSITIONS:
            with pytest.raises(IllegalTransition):
                toggle(pair, residency)
    into_rollout = {before for before, after in RESIDENCY_TRANSITIONS if after is Residency.ACTIVATING}
    into_training = {before for before, after in RESIDENCY_TRANSITIONS if after is Residency.TRAINING}
    assert into_rollout == into_training == {Residency.FREE}


def test_slots_are_stable():
    table = FakeCluster().table
    with pytest.raises(IllegalTransition, match="no slot"):
        with_rows(table, [make((Activity.ACTIVE, Stage.NONE))])
    with pytest.raises(IllegalTransition, match="never change"):
        with_rows(table, [replace(table.rows[0], gpus=())])
    assert with_rows(table, []) is table


def test_serves():
    assert serves([Role.COLOCATED]) and serves([Role.PREFILL, Role.DECODE, Role.DECODE])
    assert not serves([]) and not serves([Role.PREFILL, Role.PREFILL]) and not serves([Role.TRAINING])


# Invariants


def good() -> RoleTable:
    return FakeCluster().grown("r0-w0", "r0-w1", "s0-w0", prefill=1, decode=2).table


def edit(table: RoleTable, worker: str, **fields: object) -> RoleTable:
    return replace(table, rows=tuple(replace(r, **fields) if r.worker == worker else r for r in table.rows))


def planned(table: RoleTable, **fields: object) -> RoleTable:
    plan = PlanRecord(
        plan_id=PlanId("p9"),
        decision_id=DecisionId("d"),
        stage="applying",
        add=(),
        remove=(),
        reassign=(),
        started_ms=0,
        deadline_ms=1,
    )
    return replace(table, plan=replace(plan, **fields))


def assign(worker: str, generation: int = 9, incarnation: int = 1) -> Assign:
    return Assign(WorkerId(worker), Role.DECODE, Incarnation(incarnation), RoleGeneration(generation))


OTHER = (Gpu(NodeId("r0"), 1),)

BROKEN: list[tuple[str, Callable[[RoleTable], RoleTable]]] = [
    ("not sorted", lambda t: replace(t, rows=t.rows[::-1])),
    ("not sorted", lambda t: replace(t, rows=(t.rows[0], *t.rows))),
    ("does not go with stage", lambda t: edit(t, "r0-w0", stage=Stage.DRAINING)),
    ("unknown zone", lambda t: edit(t, "r0-w0", stage=Stage.UNKNOWN)),
    ("never transitioning", lambda t: edit(t, "t0-t0", activity=Activity.TRANSITIONING, stage=Stage.LAUNCHING)),
    ("role training does not go", lambda t: edit(t, "r0-w0", role=Role.TRAINING)),
    ("role decode does not go", lambda t: edit(t, "t0-t0", role=Role.DECODE)),
    ("without ever having had a process", lambda t: edit(t, "r0-w0", incarnation=0)),
    ("without weights", lambda t: edit(t, "r0-w0", version=NO_VERSION)),
    ("has no GPU", lambda t: edit(t, "r0-w0", gpus=())),
    ("lists a GPU twice", lambda t: edit(t, "r0-w0", gpus=OTHER * 2)),
    ("share GPU r0[1]", lambda t: edit(t, "r0-w0", gpus=OTHER)),
    ("without being a pair", lambda t: replace(t, pairs=t.pairs[:1])),
    ("overlap worker without a pair", lambda t: replace(t, pairs=t.pairs[:1])),
    ("in two pairs", lambda t: replace(t, pairs=(*t.pairs, t.pairs[0]))),
    (
        "not of an overlap and a training row",
        lambda t: replace(t, pairs=(*t.pairs, Pair(overlap=WorkerId("r0-w0"), training=WorkerId("t0-t0")))),
    ),
    (
        "residency rollout while",
        lambda t: replace(t, pairs=(replace(t.pairs[0], residency=Residency.ROLLOUT), t.pairs[1])),
    ),
    ("residency training while", lambda t: edit(t, "t0-w0", activity=Activity.ACTIVE, incarnation=1, version=0)),
    (
        "are not its own yet",
        lambda t: replace(
            edit(t, "t0-t0", activity=Activity.ACTIVE),
            training_batch=0,
            pairs=tuple(replace(p, residency=Residency.FREE) for p in t.pairs),
        ),
    ),
    (
        "both use GPU",
        lambda t: replace(
            edit(
                edit(t, "t0-t0", activity=Activity.ACTIVE), "t0-w0", activity=Activity.ACTIVE, incarnation=1, version=0
            ),
            training_batch=0,
        ),
    ),
    ("which is not in progress", lambda t: replace(t, admission_paused=PlanId("p1"))),
    ("recorded without a plan", lambda t: replace(t, writer=replace(t.writer, role_set=(WorkerId("r0-w0"),)))),
    ("unknown stage", lambda t: planned(t, stage="dreaming", reassign=(assign("r0-w0"),))),
    ("changes nothing", lambda t: planned(t)),
    ("names a worker twice", lambda t: planned(t, reassign=(assign("r0-w0"), assign("r0-w0")))),
    ("not in the table", lambda t: planned(t, reassign=(assign("x-w0"),))),
    ("is preparing nobody", lambda t: planned(t, stage="preparing", reassign=(assign("r0-w0"),))),
    ("adds s1-w1, which is inactive", lambda t: planned(t, stage="preparing", add=(assign("s1-w1"),))),
    ("a generation that it has had", lambda t: planned(t, reassign=(assign("r0-w0", generation=1),))),
    ("is still routed", lambda t: planned(t, remove=(Leave(WorkerId("r0-w0"), 0),))),
    (
        "admission is paused exactly",
        lambda t: replace(planned(t, remove=(Leave(WorkerId("r0-w0"), 0),)), admission_paused=PlanId("p9")),
    ),
    ("is inactive while the training batch is 3", lambda t: replace(t, training_batch=3)),
    ("no topology serves", lambda t: edit(t, "r0-w0", role=Role.DECODE)),
]


@pytest.mark.parametrize(("says", "break_it"), BROKEN, ids=[f"{i}-{says[:24]}" for i, (says, _) in enumerate(BROKEN)])
def test_each_violation_is_named(says: str, break_it: Callable[[RoleTable], RoleTable]):
    table = good()
    assert violations(table) == ()
    assert any(says in line for line in violations(break_it(table))), violations(break_it(table))


STEPS: list[tuple[str, Callable[[RoleTable], RoleTable]]] = [
    ("must be one more", lambda t: t),
    ("must be one more", lambda t: replace(t, epoch=Epoch(t.epoch + 2))),
    ("job changed", lambda t: replace(t, job="other")),
    ("policy version fell", lambda t: replace(t, policy_version=PolicyVersion(-1))),
    ("writer.plans fell", lambda t: replace(t, writer=replace(t.writer, plans=0))),
    ("slots are stable", lambda t: replace(t, rows=t.rows[1:])),
    ("incarnation fell", lambda t: edit(t, "r0-w0", incarnation=0)),
    ("role generation fell", lambda t: edit(t, "r0-w0", role_generation=0)),
    ("policy version fell", lambda t: edit(t, "r0-w0", version=-1)),
    ("without having been cut", lambda t: edit(t, "r0-w0", role=Role.COLOCATED)),
    ("would be disturbed", lambda t: edit(t, "r0-w0", role_generation=8)),
    ("without having been prepared", lambda t: edit(t, "s1-w0", activity=Activity.ACTIVE, incarnation=1, version=0)),
]  # fmt: skip


@pytest.mark.parametrize(("says", "break_it"), STEPS, ids=[f"{i}-{says[:24]}" for i, (says, _) in enumerate(STEPS)])
def test_each_broken_step_is_named(says: str, break_it: Callable[[RoleTable], RoleTable]):
    table = good()
    fine = replace(table, epoch=Epoch(table.epoch + 1))
    assert step_violations(table, fine) == ()
    broken = break_it(fine) if says != "must be one more" else break_it(table)
    assert any(says in line for line in step_violations(table, broken)), step_violations(table, broken)
    with pytest.raises(AssertionError, match="breaks"):
        check(table, broken)


def test_avoidable_gap_is_named():
    cluster = FakeCluster().grown("r0-w0", "r0-w1", "s0-w0")
    old = cluster.table
    assert servable(old)
    target = cluster.make_target(usable=["r0-w0", "r0-w1", "s0-w0"], prefill=1, decode=2)
    rows = [change(r, Move.SWITCH) if r.activity is Activity.ACTIVE else r for r in old.rows]
    plan = tuple(
        Assign(r.worker, Role.PREFILL if r.worker == "r0-w0" else Role.DECODE, r.incarnation, RoleGeneration(3))
        for r in rows
        if r.stage is Stage.SWITCHING
    )
    new = replace(planned(old, reassign=plan), rows=tuple(rows), epoch=Epoch(old.epoch + 1))
    new = replace(new, writer=replace(new.writer, target=target))
    assert any("a wave could have served on" in line for line in step_violations(old, new))
