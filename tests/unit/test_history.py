"""What applied plans changed, as the report and the view tell it."""

from __future__ import annotations

import msgspec

from messages.decision_engine import Leave
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import DecisionId, Epoch, Incarnation, Mode, PlanId, Role, RoleGeneration, WorkerId
from messages.monitor import Candidate, DecisionRecord
from messages.orchestrator import PlanProgress, WorkerGone
from messages.pipeline_scheduler import TrajectoryCompleted
from services.monitor.board import Board
from services.monitor.history import Counts, PlanFold, change_text, changes_of
from services.monitor.lending import lending_of
from services.monitor.report import count_plans, rollout_throughput

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


C, P, D = Role.COLOCATED, Role.PREFILL, Role.DECODE
HISTORY = (
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
        "total": 7, "grow": 2, "shrink": 0, "mode_switch": 2, "ratio_change": 1, "forced": 1, "cancelled": 1,
    }  # fmt: skip
    asked = [
        msgspec.structs.replace(RECORD, budget_id=budget, lending=True, overlap_workers=overlap, borrow=borrow)
        for budget, overlap, borrow in ((1, 1, False), (1, 1, True), (2, 1, False), (3, 0, False))
    ]
    assert lending_of([*events, *asked], {"t"}).borrows == {"count": 1, "denied_by_gate": 1, "late_returns": 0}


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
    assert change_text(changes_of(HISTORY[:1], PlanFold())[0]) == ""  # growth alone is told by its workers


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
