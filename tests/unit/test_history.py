"""What applied plans changed, as the report and the view tell it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from messages.decision_engine import Leave
from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import DecisionId, Epoch, Incarnation, Mode, PlanId, Role, RoleGeneration, WorkerId
from messages.monitor import Candidate, DecisionRecord, GpusReturned
from messages.orchestrator import PlanProgress, WorkerGone
from messages.pipeline_scheduler import TrajectoryCompleted
from services.monitor.board import Board
from services.monitor.history import Counts, PlanFold, change_text, changes_of
from services.monitor.lending import lending_of
from services.monitor.report import count_plans, plan_lines, plans_by_kinds, rollout_throughput
from tests.unit.executing import released

RECORD = DecisionRecord(
    decision_id=DecisionId("d1"),
    budget_id=1,
    train_step=0,
    profile={},
    workers=3,
    borrow=False,
    borrow_reason="",
    candidates=(Candidate(0, 0, 3, 6.0, True), Candidate(1, 2, 0, None, False), Candidate(2, 1, 0, 4.0, True)),
    chosen=Candidate(2, 1, 0, 4.0, True),
    incumbent=Candidate(0, 0, 3, 6.0, True),
    mode=Mode.DISAGGREGATED,
    thresholds={},
    forced=False,
    changed=True,
    reason="mode switch wins 33.3%",
)


def plan(
    number: int,
    add: dict[str, Role] | None = None,
    remove: tuple[str, ...] = (),
    reassign: dict[str, Role] | None = None,
    stage: str = "applying",
) -> ReconfigurationPlan:
    def assigns(roles: dict[str, Role] | None) -> tuple[Assign, ...]:
        return tuple(
            Assign(WorkerId(worker), role, Incarnation(1), RoleGeneration(1)) for worker, role in (roles or {}).items()
        )

    return ReconfigurationPlan(
        plan_id=PlanId(f"p{number}"),
        decision_id=DecisionId(f"d{number}"),
        stage=stage,
        epoch=Epoch(number),
        add=assigns(add),
        remove=tuple(Leave(WorkerId(worker), 0) for worker in remove),
        reassign=assigns(reassign),
        deadline_ms=0,
    )


def applied(plan: ReconfigurationPlan, *parts: str) -> list[Message]:
    """A plan at its cut epoch, and what its executors report."""
    reports = [PlanProgress(plan_id=plan.plan_id, part=part, report="applied") for part in parts]
    return [plan, *reports]


def all_applied(events: Sequence[Message], overlap: Collection[str]) -> tuple[Message, ...]:
    """The events, with the report of every executor that has a part in a plan after each cut epoch."""
    found: list[Message] = []
    for event in events:
        if isinstance(event, ReconfigurationPlan) and event.stage == "applying":
            named = {each.worker in overlap for each in (*event.add, *event.remove, *event.reassign)}
            found += applied(event, *(("rebuilder", "toggle")[inside] for inside in sorted(named)))
        else:
            found.append(event)
    return tuple(found)


C, P, D = Role.COLOCATED, Role.PREFILL, Role.DECODE
HISTORY = all_applied(
    (
        plan(1, add={"a": C, "b": C}),
        msgspec.structs.replace(RECORD, decision_id=DecisionId("d2")),
        plan(2, add={"t": P}, reassign={"a": P, "b": D}, stage="preparing"),
        plan(2, add={"t": P}, reassign={"a": P, "b": D}),
        plan(3, remove=("t",)),
        plan(6, add={"e": P, "f": P}),
        plan(7, reassign={"e": D}),
        msgspec.structs.replace(RECORD, decision_id=DecisionId("d4"), forced=True),
        WorkerGone(worker=WorkerId("b"), incarnation=Incarnation(1), reason="signal:9"),
        plan(4, reassign={"a": C, "e": C, "f": C}),
        plan(5, add={"c": C}),
        PlanProgress(plan_id=PlanId("p5"), part="rebuilder", report="failed"),
    ),
    ("t",),
)


def test_changes_are_told_by_role_counts_before_and_after() -> None:
    changes = changes_of(HISTORY, PlanFold(("t",)))
    assert [(str(each.before), str(each.after), each.kinds) for each in changes] == [
        ("none", "2C", ("grow",)),
        ("2C", "2P1D", ("borrow", "mode_switch")),
        ("2P1D", "1P1D", ("return",)),
        ("1P1D", "3P1D", ("grow",)),
        ("3P1D", "2P2D", ("ratio_change",)),
        ("2P2D", "3C", ("mode_switch",)),
    ]
    assert [each.forced for each in changes] == [False, False, False, False, False, True]
    assert (changes[1].borrowed, changes[2].returned) == (("t",), ("t",))


def test_counts_of_plans_and_borrows() -> None:
    changes = changes_of(HISTORY, PlanFold(("t",)))
    events = [event for event in HISTORY if not isinstance(event, WorkerGone)]
    assert count_plans(events, changes) == {
        "total": 7, "applied": 6, "grow": 2, "shrink": 0, "borrow": 1, "return": 1, "mode_switch": 2, "ratio_change": 1,
        "other": 0, "forced": 1, "untold": 0, "cancelled": 1,
    }  # fmt: skip
    assert plans_by_kinds(changes) == {
        "grow": 2, "borrow+mode_switch": 1, "mode_switch": 1, "ratio_change": 1, "return": 1,
    }  # fmt: skip
    asked = [
        msgspec.structs.replace(RECORD, budget_id=budget, lending=True, overlap_workers=overlap, borrow=borrow)
        for budget, overlap, borrow in ((1, 1, False), (1, 1, True), (2, 1, False), (3, 0, False))
    ]
    assert lending_of([*events, *asked], {"t"}).borrows == {
        "count": 1, "denied_by_gate": 1, "late_returns": 0, "returns": 0, "return_plans": 1,
        "workers_lent": 1, "workers_returned": 1, "workers_lost": 0, "workers_held": 0,
        "without_plan": 0,
    }  # fmt: skip


OVERLAP_SLOTS = ("t1", "t2", "t3", "t4")
GONE_T3 = WorkerGone(worker=WorkerId("t3"), incarnation=Incarnation(1), reason="signal:9")
JOURNAL = (
    *all_applied(
        (
            plan(1, add={"a": C, "b": C, "c": C}),  # grow
            plan(2, add={"t1": C, "t2": C}),  # borrow
            plan(3, add={"t3": C, "t4": C}, remove=("c",)),  # shrink and borrow
            plan(4, remove=("t1", "t2", "t3")),  # one return of what two borrows lent
            GpusReturned(batch=0, workers=(WorkerId("t1"), WorkerId("t2"), WorkerId("t3")), deadline_ms=9, at_ms=8),
            plan(5, add={"t3": C}),  # borrow
            GONE_T3,  # and lost
            GONE_T3,  # it is told of twice
            plan(6, add={"t1": P}, reassign={"a": P, "b": D, "t4": D}),  # borrow and mode switch
            plan(7, add={"t2": D}, stage="preparing"),  # superseded
        ),
        OVERLAP_SLOTS,
    ),
    plan(8, add={"t2": D}),  # a borrow that was rolled back at its deadline
    *all_applied(
        (
            plan(9, reassign={"t1": P}),  # nothing that has a name
            plan(10, remove=("t3",)),  # it is gone already: no return
        ),
        OVERLAP_SLOTS,
    ),
)


def test_totals_of_a_report_add_up_and_say_what_they_count() -> None:
    changes = changes_of(JOURNAL, PlanFold(OVERLAP_SLOTS))
    plans, by_kinds = count_plans(JOURNAL, changes), plans_by_kinds(changes)
    assert (plans["total"], plans["applied"], plans["cancelled"]) == (10, 8, 2)
    assert by_kinds == {
        "borrow": 2, "return": 2, "borrow+mode_switch": 1, "grow": 1, "other": 1, "shrink+borrow": 1,
    }  # fmt: skip
    assert plan_lines(plans, by_kinds) == [
        (
            "plans",
            "10 made = 8 applied + 2 cancelled (superseded, vetoed, failed, rolled back, or not yet applied at the end)",
        ),
        ("", "8 applied = 2 borrow + 2 return + 1 borrow and mode switch + 1 grow + 1 other + 1 shrink and borrow"),
    ]
    lent = lending_of(JOURNAL, OVERLAP_SLOTS)
    assert lent.lines() == [
        ("borrows", "4 plans lent GPUs of training; the gate denied 0 others"),
        ("", "6 workers lent = 3 returned (by 1 plan) + 1 lost + 2 still lent"),
        ("returns", "1 time training asked for its GPUs: for all that were lent then, or about to be; 0 late"),
    ]


def test_workers_that_training_took_back_without_a_plan_are_returned() -> None:
    events: list[Message] = [
        *applied(plan(1, add={"t1": C, "t2": C}), "toggle"),
        released("t1", 0),  # the answer to an earlier return
        released("t2", 2),
        released("t2", 2),  # told of twice
        *applied(plan(2, remove=("t1",)), "toggle"),
        released("t1", 2),
        *applied(plan(3, add={"t1": C, "t2": C}), "toggle"),
    ]
    lent = lending_of(events, OVERLAP_SLOTS)
    assert (lent.count, lent.workers_lent, lent.workers_returned, lent.without_plan, lent.workers_held) == (
        2,
        4,
        2,
        1,
        2,
    )
    assert lent.lines()[1] == (
        "", "4 workers lent = 2 returned (1 by 1 plan, 1 without a plan) + 2 still lent"
    )  # fmt: skip


def test_a_plan_rolled_back_at_its_deadline_is_cancelled_and_one_vetoed_too_late_is_not() -> None:
    late = PlanProgress(plan_id=PlanId("p2"), part="toggle", report="vetoed")
    events: list[Message] = [
        *applied(plan(1, add={"t1": C, "a": C}), "toggle"),  # the rebuilder never answers
        released("t1", 2),
        *applied(plan(2, add={"t1": C}), "toggle"),
        late,
        plan(3, add={"t2": C}),  # under way when the events end
    ]
    changes = changes_of(events, PlanFold(OVERLAP_SLOTS))
    assert [(each.plan_id, str(each.before), str(each.after)) for each in changes] == [("p2", "none", "1C")]
    assert (count_plans(events, changes)["cancelled"], lending_of(events, OVERLAP_SLOTS).workers_held) == (2, 1)


def test_a_plan_of_which_the_events_do_not_tell_whether_it_was_rolled_back_is_said_to_be() -> None:
    events = applied(plan(1, add={"t1": C, "a": C}), "rebuilder")
    changes = changes_of(events, PlanFold(OVERLAP_SLOTS))
    plans = count_plans(events, changes)
    assert (changes[0].kinds, plans["applied"], plans["untold"]) == (("grow",), 1, 1)
    assert any("the events do not tell" in text for _, text in plan_lines(plans, plans_by_kinds(changes)))
    assert lending_of(events, OVERLAP_SLOTS).workers_lent == 0


EVENTS = st.one_of(
    st.builds(
        plan,
        st.integers(1, 12),
        add=st.dictionaries(st.sampled_from("abtuv"), st.sampled_from((C, P, D)), max_size=3),
        remove=st.lists(st.sampled_from("abtuv"), max_size=3, unique=True).map(tuple),
        reassign=st.dictionaries(st.sampled_from("abtuv"), st.sampled_from((C, P, D)), max_size=3),
        stage=st.sampled_from(("preparing", "applying")),
    ),
    st.builds(
        lambda number, part, report: PlanProgress(plan_id=PlanId(f"p{number}"), part=part, report=report),
        st.integers(1, 12),
        st.sampled_from(("rebuilder", "toggle")),
        st.sampled_from(("applied", "failed", "vetoed")),
    ),
    st.builds(released, st.sampled_from("abtuv"), st.integers(0, 2)),
    st.sampled_from("abtuv").map(
        lambda worker: WorkerGone(worker=WorkerId(worker), incarnation=Incarnation(1), reason="exit:1")
    ),
)


@given(st.lists(EVENTS, max_size=30))
def test_totals_add_up_for_any_events(events: list[Message]) -> None:
    changes = changes_of(events, PlanFold("tuv"))
    plans, by_kinds = count_plans(events, changes), plans_by_kinds(changes)
    assert plans["total"] == plans["applied"] + plans["cancelled"]
    assert sum(by_kinds.values()) == plans["applied"] == len(changes)
    kinds = ("grow", "shrink", "borrow", "return", "mode_switch", "ratio_change", "other")
    assert all(plans[kind] == sum(count for key, count in by_kinds.items() if kind in key.split("+")) for kind in kinds)
    lent = lending_of(events, "tuv")
    assert lent.workers_lent == lent.workers_returned + lent.workers_lost + lent.workers_held
    assert lent.count == plans["borrow"] and lent.return_plans <= plans["return"]


def test_a_worker_that_died_and_came_back_changes_no_ratio() -> None:
    fold = PlanFold()
    fold.take(plan(1, add={"a": P, "b": D, "c": P}))
    fold.take(WorkerGone(worker=WorkerId("c"), incarnation=Incarnation(1), reason="exit:1"))
    change = fold.take(plan(2, add={"c": P}))
    assert change is not None and change.kinds == ("grow",) and fold.served == Counts(2, 1, 0)


def test_a_line_says_what_was_predicted_of_both_modes_and_why() -> None:
    change = changes_of(HISTORY, PlanFold(("t",)))[1]
    assert change_text(change) == "borrow and mode switch 2C -> 2P1D: predicted 4.0 s, 3C 6.0 s; "
    plain = msgspec.structs.replace(change, borrowed=(), kinds=("mode_switch",))
    assert change_text(plain).endswith("; mode switch wins 33.3%")
    assert change_text(changes_of(HISTORY[:2], PlanFold())[0]) == ""  # growth alone is told by its workers


def test_the_board_tells_changes_once() -> None:
    board = Board()
    for at, event in enumerate(HISTORY):
        board.take(at, event)
    assert [each.kinds for _, each in board.changes] == [
        ("grow", "mode_switch"), ("ratio_change",), ("mode_switch",),
    ]  # fmt: skip
    assert any("mode switch 2C -> 2P1D" in text for _, text in board.happenings)


def test_throughput_is_of_what_ended_in_the_span() -> None:
    def end(tokens: int) -> TrajectoryCompleted:
        return msgspec.convert(
            {
                "kind": "trajectory.completed/1", "trajectory": "t", "group": "g", "batch": 0, "retry": 0,
                "status": "completed", "reward": 0.0, "turns": 1, "generated_tokens": tokens, "min_version": 0,
                "max_version": 0, "journal": [], "env_s": 0.0, "wall_s": 0.0,
            },
            TrajectoryCompleted,
        )  # fmt: skip

    timed = [(0, RECORD), (1000, end(5)), (11_000, end(10)), (21_000, end(10))]
    assert rollout_throughput(timed) == 25 / 20
    assert rollout_throughput(timed, skip_s=10) == 20 / 11
    assert rollout_throughput(timed[:2]) == 0.0
