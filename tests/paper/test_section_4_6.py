"""Section 4.6, intra-scale elasticity: one test for each claim, on the whole cluster of real cores (tests/sim)."""

from __future__ import annotations

import pytest

from messages.ids import Activity, Epoch, PolicyVersion, Residency, Stage
from messages.monitor import GpusReturned
from messages.node_agent import Kill, Launch
from messages.orchestrator import WorkerActivated, WorkerGone, WorkerReleased
from messages.pipeline_scheduler import StepFinished
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from messages.toggle_manager import TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services.toggle_manager.config import Config
from services.toggle_manager.core import ToggleManagerCore
from tests.sim.cluster import Cluster, lending_job
from tests.unit.executing import (
    JOB,
    Driver,
    activated,
    applied,
    assign,
    inactive,
    launching,
    plan,
    published,
    ready,
    row,
)
from tests.unit.test_toggle_manager import finished, free

T = ("t0-w0", "t0-w1")
DEDICATED = ("r0-w0", "r0-w1")


@pytest.fixture
def cluster() -> Cluster:
    """Reserved workers serve; overlap processes are up and hold nothing."""
    cluster = Cluster(lending_job(training=2))
    cluster.run_until(lambda: cluster.settled and set(cluster.roles) == {*DEDICATED})
    cluster.run_until(lambda: all(cluster.row(worker).ready for worker in T))
    return cluster


def lend(cluster: Cluster) -> None:
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.settled and set(T) <= cluster.roles.keys(), what="lent")


def train(cluster: Cluster) -> int:
    """Training asks for its GPUs, and finishes its step."""
    batch = cluster.pipeline.begin()
    cluster.wish()
    cluster.run_until(lambda: cluster.pipeline.begun is None and cluster.settled, what="trained")
    return batch


def order_of(cluster: Cluster, *kinds: type) -> list[str]:
    """Commands and events of these kinds in the order in which they were said, repetitions left out."""
    said = [(command.at_ms, command.message) for command in cluster.world.commands]
    said += [(event.at_ms, event.message) for event in cluster.world.events]
    found: list[str] = []
    for _, message in sorted(said, key=lambda entry: entry[0]):
        name = type(message).__name__
        if isinstance(message, kinds) and (not found or found[-1] != name):
            found.append(name)
    return found


def test_processes_are_retained_across_hand_overs(cluster: Cluster) -> None:
    """ "It retains training and rollout processes across handoffs": one launch for any number of windows, no kill."""
    for _ in range(3):
        lend(cluster)
        train(cluster)
    for worker in T:
        launches = {message.incarnation for message in cluster.commands_to(worker, Launch)}  # type: ignore[attr-defined]
        assert launches == {1}
        assert {order.role_generation for order in cluster.commands_to(worker, Activate)} == {1, 3, 5}  # type: ignore[attr-defined]
    assert not [command for command in cluster.world.commands if isinstance(command.message, Kill)]
    assert not cluster.world.of(WorkerGone)


def test_training_releases_before_rollout_takes(cluster: Cluster) -> None:
    """ "Training releases GPU memory when borrowing begins": nothing of rollout's before the release is confirmed."""
    lend(cluster)
    assert order_of(cluster, TrainerRelease, TrainerReleased, Activate) == [
        "TrainerRelease",
        "TrainerReleased",
        "Activate",
    ]
    seen = [table.pairs[0].residency for table in cluster.world.tables]
    assert list(dict.fromkeys(seen)) == [
        Residency.TRAINING,
        Residency.RELEASING,
        Residency.ACTIVATING,
        Residency.ROLLOUT,
    ]


def test_a_fresh_overlap_worker_holds_no_device_memory(cluster: Cluster) -> None:
    """Its process is there early, so that borrowing moves device state only."""
    assert all(cluster.worker(worker).up and not cluster.worker(worker).resident for worker in T)
    assert cluster.trainer.resident


def test_overlap_workers_drain_before_returning(cluster: Cluster) -> None:
    """ "Overlap workers drain before returning", then give their memory back, then training goes on."""
    lend(cluster)
    train(cluster)
    kinds = (Drain, Deactivate, WorkerReleased, TrainerResume, TrainerResumed, StepFinished)
    found = order_of(cluster, *kinds)
    assert found.index("Drain") < found.index("Deactivate") < found.index("WorkerReleased")
    assert found.index("TrainerResume") < found.index("TrainerResumed") < found.index("StepFinished")
    assert max(i for i, name in enumerate(found) if name == "WorkerReleased") < found.index("TrainerResume")


def test_training_cannot_proceed_until_borrowed_gpus_are_released(cluster: Cluster) -> None:
    """ "Returning is mandatory because training cannot proceed until borrowed GPUs are released"."""
    lend(cluster)
    cluster.worker(T[1]).stuck.add("release")
    cluster.pipeline.begin()
    cluster.run_until(lambda: bool(cluster.world.of(WorkerReleased)))
    cluster.run(300)
    assert cluster.table.training_batch is None
    assert not [command for command in cluster.world.commands if isinstance(command.message, TrainerResume)]
    training = next(row for row in cluster.table.rows if row.worker == "t0-t0")
    assert training.activity is Activity.INACTIVE
    cluster.run_until(lambda: cluster.table.training_batch == 0)
    (returned,) = cluster.world.of(GpusReturned) or [None]
    assert returned is None or returned.at_ms <= returned.deadline_ms
    assert [gone.worker for gone in cluster.world.of(WorkerGone)] == [T[1]], "it was killed in time"


def test_a_return_is_one_epoch(cluster: Cluster) -> None:
    """No table shows training active while an overlap row, or a residency, says otherwise; nobody sees half of it."""
    lend(cluster)
    train(cluster)
    for table in cluster.world.tables:
        active = any(row.worker == "t0-t0" and row.activity is Activity.ACTIVE for row in table.rows)
        assert active is (table.training_batch is not None)
        if active:
            assert {pair.residency for pair in table.pairs} == {Residency.TRAINING}


def test_rollout_on_dedicated_gpus_continues_uninterrupted(cluster: Cluster) -> None:
    """ "Rollout on dedicated GPUs continues uninterrupted": no dedicated worker hears anything, whatever is handed over."""
    before, epoch = len(cluster.world.commands), cluster.table.epoch
    lend(cluster)
    train(cluster)
    for worker in DEDICATED:
        assert not cluster.commands_to(worker, Launch, Kill, Drain, SetRole, Activate, Deactivate, since=before)
    for table in cluster.world.tables[epoch:]:
        assert all(table.by_worker[worker].activity is Activity.ACTIVE for worker in DEDICATED)


def test_borrowing_and_role_changes_are_one_plan(cluster: Cluster) -> None:
    """Section 4.4.2: the joint decision is executed as one plan over both zones, with one cut and one admit epoch."""
    cluster.wish(borrow=True, prefill=1, decode=3)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 4)
    assert sorted(cluster.roles.values()) == ["decode", "decode", "decode", "prefill"]
    joint = [table.plan for table in cluster.world.tables if table.plan is not None and table.plan.stage == "applying"]
    (borrow, *_) = [plan for plan in joint if {assign.worker for assign in plan.add} == set(T)]
    assert borrow.reassign and "none" not in (borrow.rebuilder, borrow.toggle), "a part for each executor"
    shown = [
        {row.worker for row in table.rows if row.activity is Activity.ACTIVE} & set(T) for table in cluster.world.tables
    ]
    assert set(map(frozenset, shown)) == {frozenset(), frozenset(T)}, "never half of a group"


def test_a_vetoed_borrow_changes_no_role(cluster: Cluster) -> None:
    """The toggle manager hears training ask before the decision does: the plan is over before anything was cut."""
    before = {worker: cluster.row(worker) for worker in DEDICATED}
    cluster.wish(borrow=True, prefill=1, decode=3)
    cluster.run_until(lambda: Residency.RELEASING in cluster.residencies)
    cluster.pipeline.begin()
    cluster.run_until(lambda: cluster.table.training_batch == 0)
    assert not any(
        table.plan is not None and table.plan.stage == "applying" and table.plan.add
        for table in cluster.world.tables
        if table.epoch > cluster.world.tables[-1].epoch - 6
    )
    assert {worker: cluster.row(worker).role for worker in DEDICATED} == {w: r.role for w, r in before.items()}


def test_a_failed_borrow_returns_the_gpus_to_training(cluster: Cluster) -> None:
    """All or nothing: one overlap worker that dies while it is activated takes the whole group back."""
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.worker(T[0]).state.busy == "restore")
    cluster.worker(T[0]).die()
    cluster.run_until(lambda: cluster.table.plan is None and cluster.row(T[1]).stage is Stage.NONE)
    cluster.wish()
    cluster.run_until(lambda: cluster.residencies == {Residency.FREE})
    assert cluster.table.writer.failed_plans == 1 and not set(T) & cluster.roles.keys()
    train(cluster)


def test_facts_of_a_second_hand_over_are_new_ones(cluster: Cluster) -> None:
    """After a roll back as after a return: generations rise, so no answer is mistaken for a repetition."""
    for _ in range(2):
        lend(cluster)
        train(cluster)
    generations = [fact.role_generation for fact in cluster.world.of(WorkerActivated) if fact.worker == T[0]]
    assert generations == sorted(set(generations)) and len(generations) == 2


def test_the_cost_of_a_toggle_is_learned_online() -> None:
    """Section 5: moving averages "for toggle-enabled and toggle-disabled steps estimate switching costs online"."""
    driver = Driver(ToggleManagerCore(Config.of(JOB)))
    driver.say(ready("t0-w0"), published(0), finished(0))
    driver.now_ms += 8_000
    driver.say(finished(1))
    joiner = plan(add=(assign("t0-w0"),))
    driver.table(launching("t0-w0"), plan=joiner, residency=Residency.RELEASING)
    driver.say(free(Epoch(1)))
    driver.table(launching("t0-w0"), plan=joiner)
    driver.say(activated("t0-w0", 1), applied("t0-w0", 0))
    driver.table(row("t0-w0"))
    driver.now_ms += 5_000
    driver.table(inactive("t0-w0", generation=2), training_batch=2)
    driver.say(finished(2))
    assert (driver.state.costs.plain_step_s, driver.state.costs.toggled_step_s) == (8.0, 5.0)


def test_the_trainer_goes_on_where_it_was(cluster: Cluster) -> None:
    """Lending moves device state, not the policy: versions follow one another across windows."""
    for expected in range(3):
        lend(cluster)
        assert train(cluster) == expected
    assert cluster.table.policy_version == PolicyVersion(3)
