"""The toggle manager's core: training, the hand-over both ways, half-done borrows, what is learned.

Residencies are moved on by hand here, as the orchestrator would; tests/sim runs both cores together.
"""

from __future__ import annotations

import pytest

from messages.elastic_scheduler import TrainingBegin
from messages.envelope import Message
from messages.ids import Epoch, PolicyVersion, Residency, WorkerId
from messages.monitor import GpusReturned
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress
from messages.pipeline_scheduler import StepFinished
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from messages.runtime_tracker import OperationTimed
from messages.toggle_manager import TrainerReady, TrainerReleased, TrainerResumed
from messages.trainer import TrainerRelease, TrainerResume
from services.toggle_manager.config import Config
from services.toggle_manager.core import ToggleManagerCore
from services.toggle_manager.core_orders import RELAUNCH_MS
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
    switching,
)

RETRY_MS = TIMES.command_retry_ms
JOINERS = (assign("t0-w0"), assign("t0-w1"))
ROWS = (launching("t0-w0"), launching("t0-w1"))
IDLE = (inactive("t0-w0"), inactive("t0-w1"))


@pytest.fixture
def driver() -> Driver:
    """Both overlap processes are up, as they are from early on."""
    driver = Driver(ToggleManagerCore(Config.of(JOB)))
    driver.say(ready("t0-w0"), ready("t0-w1"))
    return driver


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


def begun(resume: TrainerResume, took_ms: int = 0) -> TrainerResumed:
    return TrainerResumed(epoch=resume.epoch, batch=resume.batch, restored_bytes=1, took_ms=took_ms)


def let_go(driver: Driver) -> list[Message]:
    """The trainer is asked to release, and does."""
    sent = driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING)
    (release,) = of(TrainerRelease, sent)
    return sent + driver.say(free(release.epoch))


def borrow(driver: Driver) -> None:
    """Both overlap workers prepared at version 0."""
    driver.say(published(0))
    let_go(driver)
    driver.table(*ROWS, plan=plan(add=JOINERS))
    driver.say(activated("t0-w0", 1), activated("t0-w1", 1))
    assert reports(driver.say(applied("t0-w0", 0), applied("t0-w1", 0))) == [("p1", "prepared")]


# Processes


def test_processes_are_launched_early_and_once() -> None:
    driver = Driver(ToggleManagerCore(Config.of(JOB)))
    assert named(driver.table(*IDLE), Launch) == [("Launch", "t0-w0"), ("Launch", "t0-w1")]
    driver.say(ready("t0-w0"))
    assert named(driver.wait(RETRY_MS)) == [("Launch", "t0-w1")], "repeated until it is ready"
    driver.say(ready("t0-w1"))
    assert driver.wait(RETRY_MS) == []


def test_a_slot_without_an_incarnation_gets_no_process() -> None:
    driver = Driver(ToggleManagerCore(Config.of(JOB)))
    assert driver.table(inactive("t0-w0", incarnation=0)) == [], "lending is off"


def test_an_idle_process_that_dies_is_launched_anew_but_not_at_once_if_it_just_was(driver: Driver) -> None:
    driver.table(*IDLE)
    driver.say(gone("t0-w0"))
    assert driver.wait(RETRY_MS) == [], "the table does not want another one yet"
    (launch,) = of(Launch, driver.table(inactive("t0-w0", incarnation=2), inactive("t0-w1")))
    assert launch.incarnation == 2
    driver.say(gone("t0-w0", incarnation=2))
    assert driver.table(inactive("t0-w0", incarnation=3), inactive("t0-w1")) == []
    assert named(driver.wait(RELAUNCH_MS)) == [("Launch", "t0-w0")]


# Training


def test_the_trainer_is_told_until_the_step_is_finished(driver: Driver) -> None:
    assert driver.table(*IDLE) == []
    (resume,) = driver.table(*IDLE, training_batch=3)
    assert isinstance(resume, TrainerResume) and (resume.epoch, resume.batch) == (2, 3)
    assert driver.wait(RETRY_MS) == [resume]
    assert driver.table(*IDLE, training_batch=3) == [], "a later epoch with the same batch is no new order"
    assert driver.say(finished(2)) == []
    assert driver.wait(RETRY_MS) == [resume]
    assert of(TrainerResume, driver.say(finished(3))) == []
    assert driver.wait(RETRY_MS) == []
    assert len(of(TrainerResume, driver.table(*IDLE, training_batch=4))) == 1


def test_a_restart_neither_forgets_nor_repeats_a_batch(driver: Driver) -> None:
    (resume,) = driver.table(*IDLE, training_batch=0)
    driver.restart()
    assert driver.wait(RETRY_MS) == [resume]
    driver.say(finished(0))
    driver.restart()
    assert driver.wait(RETRY_MS) == []


@pytest.mark.parametrize("residency", [each for each in Residency if each is not Residency.TRAINING])
def test_training_begins_only_when_its_gpus_are_its_own(driver: Driver, residency: Residency) -> None:
    assert not of(TrainerResume, driver.table(*IDLE, training_batch=0, residency=residency))
    assert len(of(TrainerResume, driver.table(*IDLE, training_batch=0))) == 1


def test_a_trainer_that_does_not_take_its_gpus_is_killed_and_told_anew(driver: Driver) -> None:
    (resume,) = of(TrainerResume, driver.table(*IDLE, training_batch=0))
    (kill,) = of(Kill, driver.wait(TIMES.prepare_ms))
    assert (kill.worker, kill.incarnation) == ("t0-t0", 1)
    driver.say(gone("t0-t0"))
    (again,) = of(TrainerResume, driver.say(TrainerReady(start_id="2", version=0, ranks=1)))
    assert again.batch == 0 and again.epoch > resume.epoch
    driver.say(begun(again))
    assert not of(Kill, driver.wait(TIMES.prepare_ms)), "the step itself may take as long as it likes"


# Borrow


def test_borrow_release_activate_weights_role(driver: Driver) -> None:
    driver.say(published(4))
    (release,) = driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING)
    assert isinstance(release, TrainerRelease)
    assert driver.wait(RETRY_MS) == [release], "nothing of rollout's starts before the trainer has let go"
    assert driver.say(free(release.epoch - 1)) == [], "an earlier hand-over's answer"
    assert driver.say(free(release.epoch)) == [], "nor before the table says so"
    sent = driver.table(*ROWS, plan=plan(add=JOINERS))
    assert [(order.worker, order.role_generation) for order in of(Activate, sent)] == [("t0-w0", 1), ("t0-w1", 1)]
    assert named(driver.say(activated("t0-w0", 1))) == [("UpdateWeights", "t0-w0")]
    driver.say(applied("t0-w0", 4), activated("t0-w1", 1))
    assert reports(driver.say(applied("t0-w1", 4))) == [("p1", "prepared")]
    sent = driver.table(*ROWS, plan=plan(stage="applying", add=JOINERS))
    assert named(sent, SetRole) == [("SetRole", "t0-w0"), ("SetRole", "t0-w1")]
    driver.say(role_set("t0-w0", 1))
    assert reports(driver.say(role_set("t0-w1", 1))) == [("p1", "applied")]


def test_weights_are_loaded_anew_after_each_activation(driver: Driver) -> None:
    borrow(driver)
    driver.table(draining("t0-w0"), draining("t0-w1"))
    driver.say(drained("t0-w0"), drained("t0-w1"), released("t0-w0", 2), released("t0-w1", 2))
    driver.table(*IDLE, residency=Residency.FREE)
    again = (assign("t0-w0", generation=3),)
    sent = driver.table(launching("t0-w0", generation=2), inactive("t0-w1"), plan=plan("p2", add=again))
    assert named(sent) == [("Activate", "t0-w0")], "retained, not launched; and the trainer has released before"
    assert named(driver.say(activated("t0-w0", 3))) == [("UpdateWeights", "t0-w0")], "of the same version"


def test_free_gpus_need_no_release(driver: Driver) -> None:
    let_go(driver)
    sent = driver.table(*ROWS, plan=plan("p2", add=JOINERS))
    assert not of(TrainerRelease, sent) and len(of(Activate, sent)) == 2


def test_each_release_wants_an_answer_of_its_own(driver: Driver) -> None:
    let_go(driver)
    driver.table(*IDLE, residency=Residency.FREE)
    driver.table(*IDLE, training_batch=0)
    driver.say(finished(0))
    driver.table(*IDLE)
    (release,) = of(TrainerRelease, driver.table(*ROWS, plan=plan("p2", add=JOINERS), residency=Residency.RELEASING))
    assert release.epoch == driver.epoch


@pytest.mark.parametrize("answered", [True, False])
def test_a_borrow_anew_without_training_in_between_asks_the_trainer_anew(driver: Driver, answered: bool) -> None:
    """The table says that the trainer may hold memory: what was heard, or asked, before is of another hand-over."""
    if answered:
        let_go(driver)
    else:
        driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING)
    driver.table(*IDLE, residency=Residency.TRAINING)
    (release,) = of(TrainerRelease, driver.table(*ROWS, plan=plan("p2", add=JOINERS), residency=Residency.RELEASING))
    assert release.epoch == driver.epoch, "the orchestrator believes no older answer"
    assert not of(Activate, driver.table(*ROWS, plan=plan("p2", add=JOINERS))), "it may still be on its GPUs"
    assert len(of(Activate, driver.say(free(release.epoch)))) == 2


def test_a_trainer_that_does_not_release_is_killed_and_asked_anew(driver: Driver) -> None:
    (release,) = driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING)
    assert isinstance(release, TrainerRelease)
    (kill,) = driver.wait(TIMES.apply_ms)
    assert isinstance(kill, Kill) and (kill.worker, kill.incarnation) == ("t0-t0", 1)
    driver.say(gone("t0-t0"))
    (again,) = driver.say(TrainerReady(start_id="2", version=0, ranks=1))
    assert isinstance(again, TrainerRelease) and again.epoch > release.epoch, "its answer is de-duplicated by this"


def test_a_trainer_that_restarts_while_lent_is_asked_to_keep_off(driver: Driver) -> None:
    borrow(driver)
    sent = driver.say(TrainerReady(start_id="2", version=0, ranks=1))
    assert len(of(TrainerRelease, sent)) == 1


def test_a_joiner_that_dies_fails_the_plan(driver: Driver) -> None:
    let_go(driver)
    driver.table(*ROWS, plan=plan(add=JOINERS))
    (report,) = of(PlanProgress, driver.say(gone("t0-w1")))
    assert (report.part, report.report, report.failed_workers) == ("toggle", "failed", ("t0-w1",))


def test_a_joiner_that_is_not_prepared_in_time_fails_the_plan(driver: Driver) -> None:
    let_go(driver)
    driver.table(*ROWS, plan=plan(add=JOINERS))
    (report,) = of(PlanProgress, driver.wait(TIMES.prepare_ms))
    assert report.report == "failed" and "not prepared within" in report.reason


def test_a_borrow_that_training_would_take_back_is_vetoed(driver: Driver) -> None:
    let_go(driver)
    (veto,) = of(PlanProgress, driver.say(TrainingBegin(batch=0)))
    assert (veto.report, veto.failed_workers) == ("vetoed", ())
    assert not reports(driver.wait(RETRY_MS)), "once"
    driver.table(*IDLE, residency=Residency.FREE)
    driver.say(finished(0))
    driver.table(*ROWS, plan=plan("p2", add=JOINERS))
    assert not reports(driver.wait(RETRY_MS)), "that batch is trained"


def test_a_batch_that_the_job_does_not_have_vetoes_nothing(driver: Driver) -> None:
    driver.say(TrainingBegin(batch=10**9))
    driver.say(TrainingBegin(batch=1))  # trains version 1, of which nothing was heard
    assert driver.state.begun_batch == -1 and len(driver.refusals) == 2


def test_a_plan_without_overlap_workers_is_not_reported(driver: Driver) -> None:
    assert driver.table(*IDLE, plan=plan(add=(assign("p0-w0"),))) == []
    assert driver.table(*IDLE, plan=plan("p2", "applying", remove=(leave("r0-w0"),))) == []


def test_role_changers_drain_first(driver: Driver) -> None:
    borrow(driver)
    driver.table(row("t0-w0"), row("t0-w1"))
    driver.say(role_set("t0-w0", 1), role_set("t0-w1", 1))
    changing = plan("p2", "applying", reassign=(assign("t0-w0", generation=3),))
    assert named(driver.table(switching("t0-w0"), row("t0-w1"), plan=changing)) == [("Drain", "t0-w0")]
    assert named(driver.say(drained("t0-w0")), SetRole) == [("SetRole", "t0-w0")]
    assert reports(driver.say(role_set("t0-w0", 3))) == [("p2", "applied")]


# Return


def test_return_drain_deactivate_released_applied_then_train(driver: Driver) -> None:
    borrow(driver)
    leaving = plan("p2", "applying", remove=(leave("t0-w0"),))
    sent = driver.table(draining("t0-w0"), row("t0-w1"), plan=leaving)
    assert named(sent, Drain, Deactivate) == [("Drain", "t0-w0")]
    (order,) = of(Deactivate, driver.say(drained("t0-w0")))
    assert (order.worker, order.role_generation) == ("t0-w0", 2)
    assert reports(driver.say(released("t0-w0", 2))) == [("p2", "applied")]
    sent = driver.table(inactive("t0-w0", generation=2), inactive("t0-w1", generation=2), training_batch=0)
    assert len(of(TrainerResume, sent)) == 1


def test_a_return_needs_no_plan(driver: Driver) -> None:
    borrow(driver)
    assert named(driver.table(draining("t0-w0"), row("t0-w1")), Drain) == [("Drain", "t0-w0")]
    assert named(driver.say(drained("t0-w0")), Deactivate) == [("Deactivate", "t0-w0")]


@pytest.mark.parametrize("dies", [False, True])
def test_a_return_that_a_dead_trainer_made_longer_is_not_learned_from(driver: Driver, dies: bool) -> None:
    borrow(driver)
    driver.table(draining("t0-w0"), draining("t0-w1"))
    driver.now_ms += 1000
    done = (inactive("t0-w0", generation=2), inactive("t0-w1", generation=2))
    (resume,) = of(TrainerResume, driver.table(*done, training_batch=0))
    if dies:
        driver.say(gone("t0-t0"))
        (resume,) = of(TrainerResume, driver.say(TrainerReady(start_id="2", version=0, ranks=1)))
    timed = of(OperationTimed, driver.say(begun(resume, took_ms=500)))
    assert [(each.operation, each.took_s) for each in timed] == ([] if dies else [("deactivate", 1.5)])


def test_the_end_of_an_earlier_trainer_says_nothing_of_the_one_that_runs(driver: Driver) -> None:
    driver.say(gone("t0-t0"), gone("t0-t0", incarnation=2), TrainerReady(start_id="3", version=0, ranks=1))
    (release,) = of(TrainerRelease, driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING))
    driver.say(gone("t0-t0", incarnation=1))
    assert driver.wait(RETRY_MS) == [release], "it has not let go"


def test_memory_given_back_after_one_borrow_is_asked_for_again_after_the_next(driver: Driver) -> None:
    borrow(driver)
    driver.table(draining("t0-w0"), draining("t0-w1"))
    driver.say(drained("t0-w0"), drained("t0-w1"), released("t0-w0", 2), released("t0-w1", 2))
    driver.say(activated("t0-w0", 3), role_set("t0-w0", 3))
    driver.table(row("t0-w0", generation=3), inactive("t0-w1", generation=2))
    driver.table(draining("t0-w0", generation=4), inactive("t0-w1", generation=2))
    (order,) = of(Deactivate, driver.say(drained("t0-w0", 4)))
    assert order.role_generation == 4


@pytest.mark.parametrize("stuck", ["drain", "deactivate"])
def test_returning_is_bounded_by_the_deadline(driver: Driver, stuck: str) -> None:
    borrow(driver)
    deadline_ms = START_MS + 4_000
    leaving = plan("p2", "applying", remove=(leave("t0-w0", deadline_ms),))
    sent = driver.table(draining("t0-w0"), plan=leaving, deadline_ms=deadline_ms)
    if stuck == "deactivate":
        sent = driver.say(drained("t0-w0"))
    while not (kills := of(Kill, sent)):
        sent = driver.wait(50)
    assert driver.now_ms + kills[0].grace_ms < deadline_ms
    assert reports(driver.say(gone("t0-w0"))) == [("p2", "applied")], "its GPUs are free all the same"


def test_a_release_is_bounded_by_the_deadline_too(driver: Driver) -> None:
    driver.table(*ROWS, plan=plan(add=JOINERS), residency=Residency.RELEASING)
    deadline_ms = START_MS + 4_000
    sent = driver.table(*IDLE, residency=Residency.RELEASING, deadline_ms=deadline_ms)
    while not (kills := of(Kill, sent)):
        sent = driver.wait(50)
    assert kills[0].worker == "t0-t0" and driver.now_ms + kills[0].grace_ms < deadline_ms


@pytest.mark.parametrize(("stage", "generation"), [("ready", 1), ("activated", 1), ("weights", 1)])
def test_a_borrow_half_done_is_undone(driver: Driver, stage: str, generation: int) -> None:
    driver.say(published(0))
    let_go(driver)
    driver.table(*ROWS, plan=plan(add=JOINERS))
    facts = {"ready": [], "activated": [activated("t0-w0", 1)], "weights": [activated("t0-w0", 1), applied("t0-w0", 0)]}
    driver.say(*facts[stage])
    undone = (inactive("t0-w0", generation=generation), inactive("t0-w1", generation=generation))
    sent = driver.table(*undone, residency=Residency.DRAINING)
    assert named(sent) == [("Deactivate", "t0-w0"), ("Deactivate", "t0-w1")]
    assert driver.say(released("t0-w0", generation), released("t0-w1", generation)) == []
    assert [resume.batch for resume in of(TrainerResume, driver.table(*undone, training_batch=7))] == [7]


def test_a_return_is_reported_with_its_deadline_and_time(driver: Driver) -> None:
    borrow(driver)
    both = {"training_batch": 3, "training_since_ms": START_MS + 700, "deadline_ms": START_MS + 900}
    (returned,) = of(GpusReturned, driver.table(*IDLE, **both))
    assert (returned.batch, returned.workers) == (3, (WorkerId("t0-w0"), WorkerId("t0-w1")))
    assert (returned.deadline_ms, returned.at_ms) == (START_MS + 900, START_MS + 700)
    assert not of(GpusReturned, driver.table(*IDLE, **both)), "once"
    driver.say(finished(3))
    driver.table(*IDLE)
    assert not of(GpusReturned, driver.table(*IDLE, training_batch=4)), "nothing was lent meanwhile"


# What is learned


def timings(messages: list[Message]) -> dict[str, float]:
    return {timed.operation: timed.took_s for timed in of(OperationTimed, messages)}


def test_whole_hand_overs_are_timed(driver: Driver) -> None:
    driver.say(published(0))
    let_go(driver)
    driver.table(*ROWS, plan=plan(add=JOINERS))
    driver.now_ms += 800
    sent = driver.say(*(activated(w, 1) for w in ("t0-w0", "t0-w1")), *(applied(w, 0) for w in ("t0-w0", "t0-w1")))
    assert timings(sent)["activate"] == 0.8
    driver.table(row("t0-w0"), row("t0-w1"))
    driver.table(draining("t0-w0"), draining("t0-w1"))
    driver.now_ms += 300
    driver.say(drained("t0-w0"), drained("t0-w1"), released("t0-w0", 2), released("t0-w1", 2))
    (resume,) = of(TrainerResume, driver.table(*IDLE, training_batch=0))
    assert timings(driver.say(begun(resume, took_ms=200)))["deactivate"] == 0.5, "the trainer's part included"
    assert not timings(driver.say(begun(resume, took_ms=200)))


def test_a_hand_over_in_which_a_process_died_teaches_nothing(driver: Driver) -> None:
    borrow(driver)
    driver.table(row("t0-w0"), row("t0-w1"))
    driver.say(gone("t0-t0"), TrainerReady(start_id="2", version=0, ranks=1))
    driver.table(draining("t0-w0"), draining("t0-w1"))
    driver.now_ms += 300
    driver.say(drained("t0-w0"), drained("t0-w1"), released("t0-w0", 2), released("t0-w1", 2))
    (resume,) = of(TrainerResume, driver.table(*IDLE, training_batch=0))
    assert "deactivate" not in timings(driver.say(begun(resume, took_ms=9_000)))
    assert driver.state.costs.return_s is None


def test_costs_are_learned_apart_for_steps_with_and_without_a_borrow(driver: Driver) -> None:
    driver.say(finished(0))
    driver.now_ms += 10_000
    assert timings(driver.say(finished(1))) == {"plain_step": 10.0}
    borrow(driver)
    driver.now_ms += 6_000
    assert timings(driver.say(finished(2))) == {"toggled_step": 6.0}
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
