"""The orchestrator core while training GPUs are lent: which answers count, which deadline holds, what is used up."""

from __future__ import annotations

import msgspec
import pytest

from messages.decision_engine import Leave
from messages.executors import Assign
from messages.ids import Activity, Epoch, Residency, RoleGeneration, Stage, WorkerId
from messages.orchestrator import PlanProgress, WorkerLost, WorkerReleased
from messages.toggle_manager import TrainerReleased
from services.jobfile import DecisionSection
from tests.unit.fake_cluster import FakeCluster, job_of

R = ["r0-w0", "r0-w1"]
T = ["t0-w0", "t0-w1"]


def lending() -> FakeCluster:
    """Reserved workers serve; the overlap slots' processes are up."""
    job = msgspec.structs.replace(job_of(), decision=DecisionSection(lending=True))
    cluster = FakeCluster(job).grown(*R)
    for worker in T:
        cluster.feed(cluster.facts_of(worker)[0])
    return cluster


def residencies(cluster: FakeCluster) -> list[Residency]:
    return [pair.residency for pair in cluster.table.pairs]


def deadlines(cluster: FakeCluster) -> set[int]:
    return {pair.deadline_ms for pair in cluster.table.pairs}


def toggle_reports(cluster: FakeCluster, report: str) -> PlanProgress:
    return msgspec.structs.replace(cluster.report(report), part="toggle")


def let_go(cluster: FakeCluster, before: int = 0) -> None:
    """The trainer answers the newest release, or one `before` it."""
    epoch = Epoch(cluster.table.writer.release_epoch - before)
    cluster.feed(TrainerReleased(epoch=epoch, freed_bytes=1, took_ms=1))


def released(cluster: FakeCluster, worker: str, before: int = 0) -> None:
    """The worker answers its newest order to give memory back, or one `before` it."""
    row = cluster.row(worker)
    generation = RoleGeneration(row.role_generation - before)
    cluster.feed(
        WorkerReleased(
            worker=row.worker, incarnation=row.incarnation, role_generation=generation, freed_bytes=1, took_ms=1
        )
    )


def cut(cluster: FakeCluster) -> tuple[Assign, ...]:
    """Training's GPUs are borrowed up to the cut epoch: what was announced to the joiners."""
    cluster.target(usable=[*R, *T], colocated=4)
    let_go(cluster)
    for worker in T:
        cluster.feed(cluster.facts_of(worker)[1])
    cluster.feed(toggle_reports(cluster, "prepared"))
    plan = cluster.table.plan
    assert plan is not None and plan.stage == "applying"
    return plan.add


def lend(cluster: FakeCluster) -> None:
    for assign in cut(cluster):
        cluster.feed(cluster.role_set(assign))
    cluster.feed(toggle_reports(cluster, "applied"))
    assert set(cluster.roles) == {*R, *T} and residencies(cluster) == [Residency.ROLLOUT] * 2


def ask_back(cluster: FakeCluster, deadline_ms: int = 0, batch: int = 0) -> None:
    """Training wants its GPUs by then (0: the target names no time)."""
    leaving = tuple((worker, deadline_ms) for worker in T)
    cluster.target(usable=R, colocated=2, leaving=leaving, training_batch=batch)


def test_training_waits_for_what_the_workers_of_this_return_say():
    """An answer of an earlier generation is of an earlier borrow: the memory was taken again since."""
    cluster = lending()
    lend(cluster)
    ask_back(cluster)
    assert residencies(cluster) == [Residency.DRAINING] * 2
    for worker in T:
        released(cluster, worker, before=1)
    assert residencies(cluster) == [Residency.DRAINING] * 2 and cluster.table.training_batch is None
    released(cluster, T[0])
    assert residencies(cluster) == [Residency.FREE, Residency.DRAINING] and cluster.table.training_batch is None
    released(cluster, T[1])
    assert residencies(cluster) == [Residency.TRAINING] * 2 and cluster.table.training_batch == 0


def test_a_worker_that_was_not_asked_to_return_frees_nothing():
    cluster = lending()
    lend(cluster)
    before = cluster.table
    released(cluster, T[0])
    assert cluster.table is before


def test_a_release_of_an_earlier_hand_over_frees_nothing():
    """Delivered again: the trainer took its GPUs back after it."""
    cluster = lending()
    lend(cluster)
    ask_back(cluster)
    for worker in T:
        released(cluster, worker)
    cluster.feed(toggle_reports(cluster, "applied"))
    assert cluster.table.training_batch == 0 and cluster.table.plan is None
    cluster.target(usable=R, colocated=2)
    cluster.target(usable=[*R, *T], colocated=4)
    assert residencies(cluster) == [Residency.RELEASING] * 2
    let_go(cluster, before=1)
    assert residencies(cluster) == [Residency.RELEASING] * 2
    let_go(cluster)
    assert residencies(cluster) == [Residency.ACTIVATING] * 2


def test_a_return_deadline_only_comes_forward():
    cluster = lending()
    lend(cluster)
    first = cluster.now_ms + 4000
    ask_back(cluster, first)
    assert deadlines(cluster) == {first}
    ask_back(cluster, first + 1000)
    assert deadlines(cluster) == {first}, "what training was promised is not taken back"
    ask_back(cluster, first - 1000)
    assert deadlines(cluster) == {first - 1000}


def test_a_return_that_names_no_time_is_bounded_from_when_it_is_asked_for():
    cluster = lending()
    lend(cluster)
    assert deadlines(cluster) == {0}
    ask_back(cluster)
    bound = cluster.now_ms + cluster.config.return_ms
    assert deadlines(cluster) == {bound}
    cluster.now_ms += 1000
    ask_back(cluster, batch=0)
    assert deadlines(cluster) == {bound}, "asking again gives no more time"
    ask_back(cluster, bound - 1)
    assert deadlines(cluster) == {bound - 1}


def failed_after_its_cut(borrows: bool) -> tuple[FakeCluster, tuple[Assign, ...]]:
    """A growth that was rolled back while applying, and what it had announced."""
    if borrows:
        cluster = lending()
        announced = cut(cluster)
    else:
        cluster = FakeCluster().grown(*R)
        cluster.target(usable=[*R, "s0-w0", "s0-w1"], colocated=4)
        cluster.prepare()
        assert cluster.table.plan is not None and cluster.table.plan.stage == "applying"
        announced = cluster.table.plan.add
    report = cluster.report("failed", announced[0].worker)
    cluster.feed(msgspec.structs.replace(report, part="toggle") if borrows else report)
    assert cluster.table.writer.failed_plans == 1
    return cluster, announced


@pytest.mark.parametrize("borrows", [False, True])
def test_generations_announced_by_a_plan_that_failed_are_never_used_again(borrows: bool):
    cluster, announced = failed_after_its_cut(borrows)
    for assign in announced:
        row = cluster.row(assign.worker)
        assert (row.activity, row.stage) == (Activity.INACTIVE, Stage.NONE)
        assert row.role_generation >= assign.role_generation, "a worker that heard of it may serve under it"
    for worker in T if borrows else ():
        released(cluster, worker)
    cluster.pass_time(cluster.config.backoff_first_ms)
    cluster.pass_time(0)
    plan = cluster.table.plan
    assert plan is not None
    following = {assign.worker: assign.role_generation for assign in plan.add}
    assert {assign.worker for assign in announced} & following.keys()
    assert all(following[old.worker] > old.role_generation for old in announced if old.worker in following)


def test_leaves_name_slots_of_the_table():
    """The target's own words are checked, also those that only a return uses."""
    cluster = lending()
    target = msgspec.structs.replace(
        cluster.make_target(usable=R, colocated=2, training_batch=0), leaving=(Leave(WorkerId("t9-w0"), 1),)
    )
    before = cluster.table
    cluster.feed(target)
    assert cluster.table is before and "no slot t9-w0" in cluster.refusals[-1]


def test_weights_of_an_earlier_borrow_prepare_nobody():
    """Delivered again before the trainer has let go: the process is the same, its memory was given back since."""
    cluster = lending()
    cluster.target(usable=[*R, *T], colocated=4)
    assert residencies(cluster) == [Residency.RELEASING] * 2
    cluster.feed(cluster.facts_of(T[0])[1])
    assert cluster.row(T[0]).stage is Stage.LAUNCHING
    let_go(cluster)
    cluster.feed(cluster.facts_of(T[0])[1])
    assert cluster.row(T[0]).stage is Stage.PREPARED


def test_a_trainer_that_is_gone_holds_nothing_and_one_that_is_silent_may():
    cluster = lending()
    cluster.target(usable=[*R, *T], colocated=4)
    row = cluster.row("t0-t0")
    cluster.feed(WorkerLost(worker=row.worker, incarnation=row.incarnation, reason="silent"))
    assert residencies(cluster) == [Residency.RELEASING] * 2
    cluster.feed(cluster.gone("t0-t0"))
    assert residencies(cluster) == [Residency.ACTIVATING] * 2


def test_a_silent_overlap_worker_is_asked_to_let_go_under_a_generation_that_it_was_never_told():
    cluster = lending()
    announced = {assign.worker: assign.role_generation for assign in cut(cluster)}
    row = cluster.row(T[0])
    cluster.feed(WorkerLost(worker=row.worker, incarnation=row.incarnation, reason="silent"))
    assert cluster.row(T[0]).role_generation > announced[row.worker]
    assert residencies(cluster)[0] is Residency.DRAINING, "it may live, and hold memory"


def test_a_borrow_cut_short_by_training_ends_its_pause_and_the_rest_goes_on():
    cluster = lending()
    cluster.target(usable=[*R, *T], prefill=1, decode=3)
    let_go(cluster)
    for worker in T:
        cluster.feed(cluster.facts_of(worker)[1])
    cluster.feed(toggle_reports(cluster, "prepared"), cluster.report("prepared"))
    plan = cluster.table.plan
    assert plan is not None and plan.stage == "applying" and plan.add and plan.reassign
    assert cluster.table.admission_paused == plan.plan_id
    cluster.target(usable=R, prefill=1, decode=1, training_batch=0)
    rest = cluster.table.plan
    assert rest is not None and (rest.plan_id, rest.add, rest.reassign) == (plan.plan_id, (), plan.reassign)
    assert cluster.table.admission_paused is None, "nobody is admitted by it any more"


def test_a_role_changer_that_training_calls_back_drains_above_what_it_was_told():
    cluster = lending()
    lend(cluster)
    cluster.target(usable=[*R, *T], prefill=3, decode=1)
    plan = cluster.table.plan
    assert plan is not None and plan.stage == "applying"
    announced = {assign.worker: assign.role_generation for assign in plan.reassign if assign.worker in T}
    assert announced
    ask_back(cluster)
    for worker, generation in announced.items():
        assert cluster.row(worker).stage is Stage.DRAINING
        assert cluster.row(worker).role_generation > generation, "it may serve under that already"
