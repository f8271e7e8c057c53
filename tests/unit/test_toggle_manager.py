"""The toggle manager's core: training, the hand-over both ways, half-done borrows, what is learned."""

from __future__ import annotations

import pytest

from messages.ids import Epoch, PolicyVersion, Residency, WorkerId
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress
from messages.pipeline_scheduler import StepFinished
from messages.rollout_worker import Activate, Deactivate, SetRole
from messages.toggle_manager import TrainerReady, TrainerReleased
from messages.trainer import TrainerRelease, TrainerResume
from pearl_state.model import Pair
from services.toggle_manager.config import Config
from services.toggle_manager.core import ToggleManagerCore
from tests.unit.executing import (
    JOB,
    START_MS,
    TIMES,
    Driver,
    activated,
    applied,
    assign,
    drained,
    draining,
    gone,
    inactive,
    launching,
    leave,
    named,
    of,
    plan,
    published,
    ready,
    released,
    reports,
    role_set,
    row,
)

RETRY_MS = TIMES.command_retry_ms
JOINERS = (assign("t0-w0"), assign("t0-w1"))
ROWS = (launching("t0-w0"), launching("t0-w1"))
IDLE = (inactive("t0-w0"), inactive("t0-w1"))


@pytest.fixture
def driver() -> Driver:
    return Driver(ToggleManagerCore(Config.of(JOB)))


def finished(batch: int) -> StepFinished:
    return StepFinished(
        batch=batch,
        version=PolicyVersion(batch + 1),
        train_s=1.0,
        trained_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        zero_variance_groups=0,
    )


def free(epoch: int) -> TrainerReleased:
    return TrainerReleased(epoch=Epoch(epoch), freed_bytes=1, took_ms=1)


def pairs(residency: Residency) -> tuple[Pair, ...]:
    return (Pair(overlap=WorkerId("t0-w0"), training=WorkerId("t0-t0"), residency=residency),)


def borrow(driver: Driver) -> None:
    """Both overlap workers prepared at version 0."""
    driver.say(published(0))
    (release,) = of(TrainerRelease, driver.table(*ROWS, plan=plan(add=JOINERS)))
    driver.say(free(release.epoch), ready("t0-w0"), ready("t0-w1"), activated("t0-w0", 1), activated("t0-w1", 1))
    assert reports(driver.say(applied("t0-w0", 0), applied("t0-w1", 0))) == [("p1", "prepared")]


def test_the_trainer_is_told_until_the_step_is_finished(driver: Driver) -> None:
    assert driver.table(*IDLE) == []
    (resume,) = driver.table(*IDLE, training_batch=3)
    assert isinstance(resume, TrainerResume) and (resume.epoch, resume.batch) == (2, 3)
    assert driver.wait(RETRY_MS) == [resume]
    assert driver.table(*IDLE, training_batch=3) == [], "a later epoch with the same batch is no new order"
    assert driver.say(finished(2)) == []
    assert driver.wait(RETRY_MS) == [resume]
    assert driver.say(finished(3)) == []
    assert driver.wait(RETRY_MS) == []
    assert len(of(TrainerResume, driver.table(*IDLE, training_batch=4))) == 1


def test_a_restart_neither_forgets_nor_repeats_a_batch(driver: Driver) -> None:
    (resume,) = driver.table(*IDLE, training_batch=0)
    driver.restart()
    assert driver.wait(RETRY_MS) == [resume]
    driver.say(finished(0))
    driver.restart()
    assert driver.wait(RETRY_MS) == []


def test_training_begins_only_when_its_gpus_are_its_own(driver: Driver) -> None:
    assert driver.table(*IDLE, training_batch=0, pairs=pairs(Residency.DRAINING)) == []
    assert len(driver.table(*IDLE, training_batch=0, pairs=pairs(Residency.TRAINING))) == 1


def test_borrow_release_launch_activate_weights_role(driver: Driver) -> None:
    driver.say(published(4))
    sent = driver.table(*ROWS, plan=plan(add=JOINERS))
    (release,) = sent
    assert isinstance(release, TrainerRelease)
    assert driver.wait(RETRY_MS) == [release], "nothing of rollout's starts before the trainer has let go"
    assert driver.say(free(release.epoch - 1)) == [], "an earlier hand-over's answer"
    assert named(driver.say(free(release.epoch)), Launch) == [("Launch", "t0-w0"), ("Launch", "t0-w1")]
    (activate,) = of(Activate, driver.say(ready("t0-w0")))
    assert activate.role_generation == 1
    assert named(driver.say(activated("t0-w0", 1))[-1:]) == [("UpdateWeights", "t0-w0")]
    driver.say(applied("t0-w0", 4), ready("t0-w1"), activated("t0-w1", 1))
    assert reports(driver.say(applied("t0-w1", 4))) == [("p1", "prepared")]
    sent = driver.table(*ROWS, plan=plan(stage="applying", add=JOINERS))
    assert named(sent, SetRole) == [("SetRole", "t0-w0"), ("SetRole", "t0-w1")]
    driver.say(role_set("t0-w0", 1))
    assert reports(driver.say(role_set("t0-w1", 1))) == [("p1", "applied")]


def test_a_retained_process_is_activated_not_launched(driver: Driver) -> None:
    borrow(driver)
    driver.table(row("t0-w0"), row("t0-w1"))
    leaving = plan("p2", "applying", remove=(leave("t0-w0"), leave("t0-w1")))
    driver.table(draining("t0-w0"), draining("t0-w1"), plan=leaving)
    driver.say(drained("t0-w0"), drained("t0-w1"), released("t0-w0", 2), released("t0-w1", 2))
    driver.table(*IDLE, training_batch=0)
    driver.say(finished(0))
    again = (assign("t0-w0", generation=3),)
    (release,) = of(TrainerRelease, driver.table(launching("t0-w0", generation=2), plan=plan("p3", add=again)))
    sent = driver.say(free(release.epoch))
    assert named(sent) == [("Activate", "t0-w0")]


def test_return_drain_deactivate_released_applied_then_train(driver: Driver) -> None:
    borrow(driver)
    leaving = plan("p2", "applying", remove=(leave("t0-w0"),))
    assert named(driver.table(draining("t0-w0"), row("t0-w1"), plan=leaving), Deactivate) == []
    (order,) = of(Deactivate, driver.say(drained("t0-w0")))
    assert (order.worker, order.role_generation) == ("t0-w0", 2)
    assert reports(driver.say(released("t0-w0", 2))) == [("p2", "applied")]
    both_back = (inactive("t0-w0", generation=2), inactive("t0-w1"))
    sent = driver.table(*both_back, training_batch=0)
    assert named(sent) == [("Deactivate", "t0-w1")], "the other still holds memory: training must wait"
    assert len(of(TrainerResume, driver.say(released("t0-w1", 1)))) == 1


@pytest.mark.parametrize("stuck", ["drain", "deactivate"])
def test_returning_is_bounded_by_the_deadline(driver: Driver, stuck: str) -> None:
    borrow(driver)
    deadline_ms = START_MS + 4_000
    leaving = plan("p2", "applying", remove=(leave("t0-w0", deadline_ms),))
    sent = driver.table(draining("t0-w0"), plan=leaving)
    if stuck == "deactivate":
        sent = driver.say(drained("t0-w0"))
    while not (kills := of(Kill, sent)):
        sent = driver.wait(50)
    assert driver.now_ms + kills[0].grace_ms <= deadline_ms
    assert reports(driver.say(gone("t0-w0"))) == [("p2", "applied")], "its GPUs are free all the same"


@pytest.mark.parametrize("stage", ["release", "launched", "ready", "activated", "weights"])
def test_a_borrow_half_done_is_undone(driver: Driver, stage: str) -> None:
    driver.say(published(0))
    joiner = plan(add=JOINERS[:1])
    (release,) = of(TrainerRelease, driver.table(launching("t0-w0"), plan=joiner))
    steps = {
        "release": [],
        "launched": [free(release.epoch)],
        "ready": [free(release.epoch), ready("t0-w0")],
        "activated": [free(release.epoch), ready("t0-w0"), activated("t0-w0", 1)],
        "weights": [free(release.epoch), ready("t0-w0"), activated("t0-w0", 1), applied("t0-w0", 0)],
    }
    driver.say(*steps[stage])
    sent = driver.table(inactive("t0-w0", generation=0), training_batch=7)
    if stage == "launched":
        assert named(sent) == [("Kill", "t0-w0")]
        sent = driver.say(gone("t0-w0"))
    elif stage != "release":
        assert named(sent) == [("Deactivate", "t0-w0")]
        (order,) = of(Deactivate, sent)
        assert order.role_generation == (0 if stage == "ready" else 1), "not below what the worker was told before"
        sent = driver.say(released("t0-w0", order.role_generation))
    assert [resume.batch for resume in of(TrainerResume, sent)] == [7]


def test_a_trainer_that_does_not_release_is_killed_and_asked_anew(driver: Driver) -> None:
    (release,) = driver.table(*ROWS, plan=plan(add=JOINERS))
    assert isinstance(release, TrainerRelease)
    (kill,) = driver.wait(TIMES.apply_ms)
    assert isinstance(kill, Kill) and (kill.worker, kill.incarnation) == ("t0-t0", 1)
    driver.say(gone("t0-t0"))
    (again,) = driver.say(TrainerReady(start_id="2", version=0, ranks=1))
    assert isinstance(again, TrainerRelease) and again.epoch > release.epoch, "its answer is de-duplicated by this"


def test_a_trainer_that_restarts_while_lent_is_asked_to_release_again(driver: Driver) -> None:
    borrow(driver)
    sent = driver.say(TrainerReady(start_id="2", version=0, ranks=1))
    assert len(of(TrainerRelease, sent)) == 1


def test_a_joiner_that_dies_fails_the_plan(driver: Driver) -> None:
    (release,) = of(TrainerRelease, driver.table(*ROWS, plan=plan(add=JOINERS)))
    driver.say(free(release.epoch))
    (report,) = of(PlanProgress, driver.say(gone("t0-w1")))
    assert (report.part, report.report, report.failed_workers) == ("toggle", "failed", ("t0-w1",))


def test_a_plan_without_overlap_workers_is_not_reported(driver: Driver) -> None:
    assert driver.table(*IDLE, plan=plan(add=(assign("p0-w0"),))) == []
    assert driver.table(*IDLE, plan=plan("p2", "applying", remove=(leave("r0-w0"),))) == []


def test_costs_are_learned_apart_for_steps_with_and_without_a_borrow(driver: Driver) -> None:
    driver.say(finished(0))
    driver.now_ms += 10_000
    driver.say(finished(1))
    borrow(driver)
    driver.now_ms += 6_000
    driver.say(finished(2))
    costs = driver.state.costs
    assert (costs.plain_step_s, costs.toggled_step_s) == (10.0, 6.0)
    assert costs.borrow_s is not None and costs.return_s is None


def test_nonsense_is_refused_and_changes_nothing(driver: Driver) -> None:
    before = driver.state
    assert driver.say(ready("zz-w0"), "?") == []
    assert len(driver.refusals) == 2
    assert driver.state == before
    assert driver.say(gone("p0-w0"), ready("r0-w0")) == []
    assert len(driver.refusals) == 2, "the dedicated zone's are the cluster rebuilder's"
