"""Minimal-change planning (paper 4.4.2): against brute force, its ties, its waves, and `pearl plan`'s JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.ids import Activity, Gpu, Incarnation, NodeId, PolicyVersion, Role, Stage, WorkerId, Zone
from pearl_state.model import ROLLOUT_ROLES, Row, serves
from pearl_state.plan import Counts, MinimalPlan, choose_members, first_wave, fit, minimal_change
from pearl_state.plan_files import PlanInputError, plan_from_files


def row(
    worker: str,
    role: Role = Role.COLOCATED,
    activity: Activity = Activity.ACTIVE,
    zone: Zone = Zone.PREEMPTIBLE,
    stage: Stage = Stage.NONE,
) -> Row:
    node, slot = worker.split("-w")
    return Row(
        worker=WorkerId(worker),
        gpus=(Gpu(NodeId(node), int(slot)),),
        zone=zone,
        role=role,
        activity=activity,
        stage=stage,
        incarnation=Incarnation(1),
        version=PolicyVersion(0),
    )


@st.composite
def tables(draw: st.DrawFn, most: int = 6) -> list[Row]:
    """Rows in any legal condition, on nodes of two."""
    count = draw(st.integers(1, most))
    conditions = [
        (Activity.ACTIVE, Stage.NONE),
        (Activity.ACTIVE, Stage.NONE),
        (Activity.INACTIVE, Stage.NONE),
        (Activity.TRANSITIONING, Stage.LAUNCHING),
        (Activity.TRANSITIONING, Stage.PREPARED),
    ]
    rows: list[Row] = []
    for number in range(count):
        activity, stage = draw(st.sampled_from(conditions))
        zone = draw(st.sampled_from([Zone.RESERVED, Zone.PREEMPTIBLE]))
        rows.append(row(f"n{number // 2}-w{number % 2}", draw(st.sampled_from(ROLLOUT_ROLES)), activity, zone, stage))
    return rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Row], list[WorkerId], Counts]:
    rows = draw(tables())
    members = draw(st.lists(st.sampled_from([row.worker for row in rows]), unique=True))
    cuts = sorted((draw(st.integers(0, len(members))), draw(st.integers(0, len(members)))))
    return rows, members, Counts(cuts[0], cuts[1] - cuts[0], len(members) - cuts[1])


def after(rows: list[Row], plan: MinimalPlan) -> dict[WorkerId, Role]:
    """Active workers and roles once the plan is applied."""
    roles = {row.worker: row.role for row in rows if row.activity is Activity.ACTIVE and row.worker not in plan.remove}
    return roles | {placement.worker: placement.role for placement in (*plan.add, *plan.reassign)}


def least_changes(rows: list[Row], sets: list[tuple[WorkerId, ...]], counts: Counts) -> int:
    """Fewest changes of any placement of the counts on any of the target sets, by trying all."""
    active = {row.worker: row.role for row in rows if row.activity is Activity.ACTIVE}
    roles = [role for role in ROLLOUT_ROLES for _ in range(counts.of(role))]
    best = 10**9
    for members in sets:
        membership = len(set(members) ^ active.keys())
        for order in set(itertools.permutations(roles)):
            changed = sum(w in active and active[w] is not r for w, r in zip(members, order, strict=True))
            best = min(best, membership + changed)
    return best


@settings(max_examples=150, deadline=None)
@given(cases())
def test_plan_reaches_the_target_with_the_fewest_changes(case: tuple[list[Row], list[WorkerId], Counts]):
    rows, members, counts = case
    plan = minimal_change(rows, members, counts)
    result = after(rows, plan)
    assert set(result) == set(members)
    assert Counter(result.values()) == Counter({role: counts.of(role) for role in ROLLOUT_ROLES if counts.of(role)})
    assert plan.d_worker + plan.d_role == least_changes(rows, [tuple(members)], counts)
    # eq. 5 and eq. 6, literally
    active = {row.worker: row.role for row in rows if row.activity is Activity.ACTIVE}
    assert plan.d_worker == len(set(members) - active.keys()) + len(active.keys() - set(members))
    source = Counter(active[worker] for worker in active.keys() & set(members))
    assert plan.d_role == sum(source[role] - min(source[role], counts.of(role)) for role in ROLLOUT_ROLES)
    assert plan == minimal_change(list(rows), sorted(members), counts)


@settings(max_examples=100, deadline=None)
@given(tables(5), st.data())
def test_choice_of_members_is_minimal_too(rows: list[Row], data: st.DataObject):
    usable = data.draw(st.lists(st.sampled_from([row.worker for row in rows]), unique=True))
    total = data.draw(st.integers(0, len(usable)))
    prefill = data.draw(st.integers(0, total))
    counts = Counts(prefill, total - prefill) if data.draw(st.booleans()) else Counts(colocated=total)
    members = choose_members(rows, usable, counts)
    plan = minimal_change(rows, members, counts)
    sets = [tuple(each) for each in itertools.combinations(usable, total)]
    assert plan.d_worker + plan.d_role == least_changes(rows, sets, counts)


def test_ties_prefer_reserved_slots_and_whole_nodes():
    empty = [row(f"{n}-w{i}", activity=Activity.INACTIVE) for n in ("a", "b") for i in range(2)]
    empty.append(row("z-w0", activity=Activity.INACTIVE, zone=Zone.RESERVED))
    workers = [r.worker for r in empty]
    assert choose_members(empty, workers, Counts(colocated=1)) == ("z-w0",)
    assert choose_members(empty, workers, Counts(colocated=3)) == ("a-w0", "a-w1", "z-w0")
    full = [msgspec.structs.replace(r, activity=Activity.ACTIVE) for r in empty]
    assert choose_members(full, workers, Counts(colocated=3)) == ("a-w0", "a-w1", "z-w0")  # b leaves whole
    assert choose_members(full, workers, Counts(colocated=1)) == ("z-w0",)


def test_slots_are_taken_where_most_are_free() -> None:
    empty = [row(worker, activity=Activity.INACTIVE) for worker in ("a-w0", "b-w0", "b-w1", "c-w0")]
    assert choose_members(empty, [r.worker for r in empty], Counts(colocated=2)) == ("b-w0", "b-w1")


@pytest.mark.parametrize("roles", [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)])
def test_of_equals_decode_workers_stay(roles: tuple[Role, Role]):
    rows = [row(f"{node}-w{index}", role) for node in ("a", "b") for index, role in enumerate(roles)]
    kept = choose_members(rows, [r.worker for r in rows], Counts(colocated=3))
    assert {each.worker for each in rows if each.role is Role.DECODE} < set(kept)


def leaving_order(rows: list[Row], role: Role) -> list[list[str]]:
    """Who has left when all but n of these, all of one role, are to go: for n from their number down to 0, the newly gone."""
    gone: list[set[str]] = []
    for total in range(len(rows), -1, -1):
        counts = Counts(**{role.value: total})
        gone.append({r.worker for r in rows} - set(choose_members(rows, [r.worker for r in rows], counts)))
    return [sorted(later - earlier) for earlier, later in itertools.pairwise(gone)]


def test_lent_workers_leave_before_preemptible_and_those_before_reserved_ones():
    """Whatever their names and places in the table, and although the lent and preemptible ones share no node."""
    rows = [
        row("a-w0", zone=Zone.OVERLAP),
        row("z-w0", zone=Zone.RESERVED),
        row("m-w0"),
        row("b-w0", zone=Zone.RESERVED),
        row("y-w0", zone=Zone.OVERLAP),
        row("c-w0"),
    ]
    expected = [["y-w0"], ["a-w0"], ["m-w0"], ["c-w0"], ["z-w0"], ["b-w0"]]
    for order in itertools.permutations(rows):
        assert leaving_order(list(order), Role.COLOCATED) == expected


def test_a_zone_leaves_before_the_next_however_large_its_nodes_are():
    """A small lent node goes before a large preemptible one, and that before a larger reserved one."""
    rows = [
        row("t-w0", zone=Zone.OVERLAP),
        *(row(f"s-w{i}") for i in range(2)),
        *(row(f"r-w{i}", zone=Zone.RESERVED) for i in range(3)),
    ]
    workers = [r.worker for r in rows]
    kept = {n: choose_members(rows, workers, Counts(colocated=n)) for n in range(1, 6)}
    assert kept[5] == ("r-w0", "r-w1", "r-w2", "s-w0", "s-w1")
    assert kept[4] == ("r-w0", "r-w1", "r-w2", "s-w0")
    assert kept[3] == ("r-w0", "r-w1", "r-w2")
    assert kept[2] == ("r-w0", "r-w1") and kept[1] == ("r-w0",)


def test_whole_nodes_leave_before_parts_of_others():
    """Of as many leavers as a node has workers, one node is emptied; what is left over comes from the smallest remaining node."""
    rows = [row(f"{node}-w{i}") for node, size in (("a", 3), ("b", 2), ("c", 1)) for i in range(size)]
    workers = [r.worker for r in rows]
    kept = {n: choose_members(rows, workers, Counts(colocated=n)) for n in range(6)}
    assert kept[5] == ("a-w0", "a-w1", "a-w2", "b-w0", "b-w1")  # node c
    assert kept[4] == ("a-w0", "a-w1", "a-w2", "c-w0")  # node b
    assert kept[3] == ("b-w0", "b-w1", "c-w0")  # node a: the largest that may go whole
    assert kept[2] == ("b-w0", "b-w1")  # nodes a, c
    assert kept[1] == ("c-w0",)  # nodes a, b
    assert kept[0] == ()


def test_a_whole_node_leaves_before_a_part_of_one_that_is_lent():
    """Emptying a node comes before the zones: half a lent node would be of no use to training."""
    rows = [row("s-w0"), *(row(f"t-w{i}", zone=Zone.OVERLAP) for i in range(2))]
    workers = [r.worker for r in rows]
    assert choose_members(rows, workers, Counts(colocated=2)) == ("t-w0", "t-w1")
    assert choose_members(rows, workers, Counts(colocated=1)) == ("s-w0",)


def test_where_no_node_leaves_whole_lent_workers_go_first_then_those_of_the_smallest_node():
    lent = [
        row(f"{node}-w{i}", zone=zone)
        for node, zone in (("a", Zone.OVERLAP), ("b", Zone.PREEMPTIBLE))
        for i in range(2)
    ]
    assert "a-w1" not in choose_members(lent, [r.worker for r in lent], Counts(colocated=3))
    spot = [row(f"{node}-w{i}") for node, size in (("a", 2), ("b", 3)) for i in range(size)]
    assert "a-w1" not in choose_members(spot, [r.worker for r in spot], Counts(colocated=4))


def test_among_equals_the_later_name_leaves_first():
    """Nodes first, then workers on a node: so that the same rows always give the same plan."""
    nodes = [row(f"{node}-w0") for node in ("a", "b", "c")]
    assert leaving_order(nodes, Role.COLOCATED) == [["c-w0"], ["b-w0"], ["a-w0"]]
    one_node = [row(f"a-w{i}") for i in range(3)]
    assert leaving_order(one_node, Role.DECODE) == [["a-w2"], ["a-w1"], ["a-w0"]]


def test_of_one_node_and_zone_decode_workers_stay_longest():
    """Where the counts leave the choice: a surplus of both roles, one to go, and decode workers have prefix-warm caches."""
    rows = [row("a-w0", Role.PREFILL), row("a-w1", Role.DECODE), row("a-w2", Role.DECODE), row("a-w3", Role.PREFILL)]
    workers = [r.worker for r in rows]
    assert choose_members(rows, workers, Counts(colocated=3)) == ("a-w0", "a-w1", "a-w2")
    assert choose_members(rows, workers, Counts(colocated=2)) == ("a-w1", "a-w2")
    assert choose_members(rows, workers, Counts(colocated=1)) == ("a-w1",)


def test_only_surplus_roles_leave_even_where_others_would_go_first():
    """The order above is for ties: a plan with fewer changes comes before it."""
    rows = [
        row("a-w0", Role.PREFILL, zone=Zone.RESERVED),
        row("a-w1", Role.PREFILL, zone=Zone.RESERVED),
        row("t-w0", Role.DECODE, zone=Zone.OVERLAP),
    ]
    kept = choose_members(rows, [r.worker for r in rows], Counts(prefill=1, decode=1))
    assert kept == ("a-w0", "t-w0")


def test_preparing_workers_are_taken_before_empty_slots():
    rows = [
        row("a-w0", activity=Activity.INACTIVE, zone=Zone.RESERVED),
        row("a-w1", activity=Activity.TRANSITIONING, stage=Stage.LAUNCHING),
        row("b-w0", activity=Activity.TRANSITIONING, stage=Stage.PREPARED),
    ]
    workers = [r.worker for r in rows]
    assert choose_members(rows, workers, Counts(colocated=1)) == ("b-w0",)
    assert choose_members(rows, workers, Counts(colocated=2)) == ("a-w1", "b-w0")


def test_leftovers_of_an_unfinished_plan_are_planned_again():
    rows = [
        row("a-w0"),
        row("a-w1", activity=Activity.TRANSITIONING, stage=Stage.DRAINING),
        row("b-w0", activity=Activity.TRANSITIONING, stage=Stage.SWITCHING),
    ]
    plan = minimal_change(rows, [WorkerId("a-w0"), WorkerId("b-w0")], Counts(colocated=2))
    assert plan.remove == ("a-w1",) and [p.worker for p in plan.reassign] == ["b-w0"]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 24))
def test_fit_is_servable_and_never_larger(prefill: int, decode: int, colocated: int, workers: int):
    asked = Counts(prefill, decode, colocated)
    fitted = fit(asked, workers)
    assert fitted.total == min(asked.total, workers)
    assert fitted.servable or fitted.total == 0
    if asked.servable and workers >= asked.total:
        assert fitted == asked
    if asked.servable and not colocated and fitted.total >= 2:
        assert fitted.colocated == 0  # the mode is kept where it can be


@settings(max_examples=200, deadline=None)
@given(cases())
def test_waves_always_serve_where_an_anchor_exists(case: tuple[list[Row], list[WorkerId], Counts]):
    rows, members, counts = case
    if not counts.servable:
        return
    for _ in range(4):
        plan = minimal_change(rows, members, counts)
        if plan.empty:
            break
        wave = first_wave(rows, plan, ())
        assert not wave.empty
        if wave != plan:
            cut = {p.worker for p in wave.reassign} | set(wave.remove)
            left = [r.role for r in rows if r.activity is Activity.ACTIVE and r.worker not in cut]
            assert serves(left)
        roles = after(rows, wave)
        assert wave == plan or serves(roles.values())
        rows = [
            msgspec.structs.replace(
                r,
                role=roles.get(r.worker, r.role),
                activity=Activity.ACTIVE if r.worker in roles else Activity.INACTIVE,
                stage=Stage.NONE,
            )
            for r in rows
        ]
    else:
        raise AssertionError("waves without end")


@pytest.mark.parametrize("workers", range(3, 7))
def test_three_workers_or_more_can_switch_mode_without_a_gap(workers: int):
    for prefill in range(1, workers):
        targets = [Counts(colocated=workers), Counts(prefill, workers - prefill)]
        for source, target in (targets, reversed(targets)):
            roles = [role for role in ROLLOUT_ROLES for _ in range(source.of(role))]
            rows = [row(f"n{i}-w0", role) for i, role in enumerate(roles)]
            plan = minimal_change(rows, [r.worker for r in rows], target)
            assert plan.d_role == workers
            assert first_wave(rows, plan, ()) != plan


# pearl plan

TABLE = {
    "epoch": 7,
    "rows": [
        {"worker": "n1-w0", "gpus": [["n1", 0]], "zone": "reserved", "role": "prefill", "activity": "active"},
        {"worker": "n1-w1", "gpus": [["n1", 1]], "zone": "reserved", "role": "decode", "activity": "active"},
        {"worker": "n2-w0", "gpus": [["n2", 0]], "zone": "preemptible", "role": "decode", "activity": "active"},
        {"worker": "n2-w1", "gpus": [["n2", 1]], "zone": "preemptible", "role": "decode", "activity": "inactive"},
        {"worker": "n3-t0", "gpus": [["n3", 0]], "zone": "training", "role": "training", "activity": "inactive"},
    ],
}


def test_plan_from_files():
    target = {"workers": ["n1-w0", "n1-w1", "n2-w1"], "prefill": 2, "decode": 1, "colocated": 0}
    assert plan_from_files(TABLE, target) == {
        "add": [{"worker": "n2-w1", "role": "prefill"}],
        "remove": ["n2-w0"],
        "reassign": {},
        "d_worker": 2,
        "d_role": 0,
    }
    target = {"workers": ["n1-w0", "n1-w1", "n2-w0"], "colocated": 3}
    result = plan_from_files(TABLE, target)
    assert result["d_worker"] == 0 and result["d_role"] == 3 and set(result["reassign"].values()) == {"colocated"}
    json.dumps(result)


def test_plan_from_files_takes_a_dump_of_the_bucket():
    dump = {**TABLE, "rows": [{**r, "gpus": [{"node": "n", "index": 0}], "stage": "none"} for r in TABLE["rows"]]}  # type: ignore[dict-item,attr-defined]
    assert plan_from_files(dump, {"workers": [], "colocated": 0})["remove"] == ["n1-w0", "n1-w1", "n2-w0"]


def _row_with(**change: object) -> dict[str, object]:
    rows = [dict(each) for each in TABLE["rows"]]  # type: ignore[call-overload]
    rows[0] |= change
    return {"rows": rows}


@pytest.mark.parametrize(
    ("table", "target", "says"),
    [
        (TABLE, {"workers": ["n1-w0"], "colocated": 2}, "= 2, but workers lists 1"),
        (TABLE, {"workers": ["n1-w0", "n1-w0"], "colocated": 2}, "twice"),
        (TABLE, {"workers": ["x"], "colocated": 1}, "worker x is not in the table"),
        (TABLE, {"workers": ["n3-t0"], "colocated": 1}, "training worker"),
        (TABLE, {"workers": [], "prefill": -1, "decode": 1}, "prefill is -1"),
        (TABLE, {"colocated": 1}, "target: .*workers"),
        (TABLE, {"workers": "n1-w0", "colocated": 1}, "target: "),
        ({"epoch": 1}, {"workers": []}, "table: .*rows"),
        (_row_with(zone="moon"), {"workers": []}, r"rows\[0\] \(n1-w0\): zone"),
        (_row_with(role="cook"), {"workers": []}, "role must be"),
        (_row_with(activity="asleep"), {"workers": []}, "activity must be"),
        (_row_with(gpus=[["n1"]]), {"workers": []}, "gpus must be"),
        (_row_with(gpus=[3]), {"workers": []}, "gpus must be"),
        (_row_with(role="training"), {"workers": []}, "does not go with zone"),
        (_row_with(worker="n1-w1"), {"workers": []}, "has a row already"),
        ([], {"workers": []}, "table: "),
    ],
)
def test_plan_from_files_says_what_is_wrong(table: dict[str, object], target: dict[str, object], says: str):
    with pytest.raises(PlanInputError, match=says):
        plan_from_files(table, target)
