"""The cluster rebuilder's core: growth, shrink, role changes, death at each stage, supersession, convergence."""

from __future__ import annotations

import pytest

from messages.elastic_scheduler import NodeUp
from messages.executors import ReconfigurationPlan
from messages.ids import Activity, DecisionId, Epoch, NodeId, PlanId, Role
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress
from messages.rollout_worker import Drain, SetRole, UpdateWeights
from messages.runtime_tracker import OperationTimed
from services.cluster_rebuilder.config import Config
from services.cluster_rebuilder.core import ClusterRebuilderCore
from tests.unit.executing import (
    JOB,
    START_MS,
    TIMES,
    Driver,
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
    reports,
    role_set,
    row,
    switching,
)

RETRY_MS = TIMES.command_retry_ms
JOINERS = (assign("p0-w0"), assign("p0-w1"))


@pytest.fixture
def driver() -> Driver:
    return Driver(ClusterRebuilderCore(Config.of(JOB)))


def prepare(driver: Driver) -> None:
    """Two joiners brought to "prepared" at version 0."""
    driver.say(published(0))
    driver.table(row("r0-w0"), launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS))
    driver.say(ready("p0-w0"), ready("p0-w1"), applied("p0-w0", 0))
    assert reports(driver.say(applied("p0-w1", 0))) == [("p1", "prepared")]


def test_growth_launch_weights_prepared_role_applied(driver: Driver) -> None:
    driver.say(published(0))
    sent = driver.table(row("r0-w0"), launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS))
    assert named(sent) == [("Launch", "p0-w0"), ("Launch", "p0-w1")]
    assert of(Launch, sent)[1].gpus == (1,)
    (update,) = driver.say(ready("p0-w0"))
    assert isinstance(update, UpdateWeights) and (update.worker, update.version, update.uri) == ("p0-w0", 0, "/s/0")
    sent = driver.say(applied("p0-w0", 0), ready("p0-w1"), applied("p0-w1", 0))
    assert reports(sent) == [("p1", "prepared")]
    assert not of(SetRole, driver.wait(10 * RETRY_MS)), "no role before the cut epoch"
    sent = driver.table(row("r0-w0"), launching("p0-w0"), launching("p0-w1"), plan=plan(stage="applying", add=JOINERS))
    assert named(sent) == [("SetRole", "p0-w0"), ("SetRole", "p0-w1")]
    sent = driver.say(role_set("p0-w0", 1), role_set("p0-w1", 1))
    assert reports(sent) == [("p1", "applied")]
    assert "finalize" in [timing.operation for timing in of(OperationTimed, sent)]
    assert driver.table(row("r0-w0"), row("p0-w0"), row("p0-w1")) == []


def test_news_of_one_worker_gives_no_command_to_another(driver: Driver) -> None:
    """Else a plan of a thousand workers repeats its commands faster than their answers can be read."""
    workers = ["p0-w0", "p0-w1", "r0-w0"]
    changes = tuple(assign(worker, Role.DECODE, 1, 2) for worker in workers)
    sent = driver.table(*map(draining, workers), plan=plan(stage="applying", reassign=changes))
    assert named(sent) == [("Drain", worker) for worker in workers]
    driver.now_ms += RETRY_MS
    for worker in workers:
        sent = driver.say(drained(worker))
        assert [each.worker for each in of(SetRole, sent)] == [worker] and not of(Drain, sent)
    sent = driver.say(*(role_set(worker, 2, Role.DECODE) for worker in workers))
    assert reports(sent) == [("p1", "applied")]


def test_commands_are_repeated_until_answered(driver: Driver) -> None:
    driver.table(launching("p0-w0"), plan=plan(add=JOINERS[:1]))
    assert driver.wait(RETRY_MS - 1) == []
    assert named(driver.wait(1)) == [("Launch", "p0-w0")]
    driver.say(ready("p0-w0"))
    assert driver.wait(RETRY_MS) == [], "no snapshot yet, nothing to load"
    assert named(driver.say(published(0))) == [("UpdateWeights", "p0-w0")]
    assert named(driver.wait(RETRY_MS)) == [("UpdateWeights", "p0-w0")]


def test_a_node_agent_that_starts_gets_its_commands_at_once(driver: Driver) -> None:
    driver.table(launching("p0-w0"), plan=plan(add=JOINERS[:1]))
    node = NodeUp(node=NodeId("p0"), gpus=(0, 1), agent_incarnation=1, host="h")
    assert named(driver.say(node)) == [("Launch", "p0-w0")]


def test_only_the_plan_in_the_table_is_obeyed(driver: Driver) -> None:
    message = ReconfigurationPlan(
        plan_id=PlanId("p1"),
        decision_id=DecisionId("d1"),
        stage="preparing",
        epoch=Epoch(1),
        add=JOINERS,
        remove=(),
        reassign=(),
        deadline_ms=START_MS + 1,
    )
    assert driver.say(message) == []
    assert driver.wait(RETRY_MS) == []
    assert len(of(Launch, driver.table(launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS)))) == 2
    assert driver.table(row("r0-w0")) == []
    assert driver.wait(RETRY_MS) == [], "launched, but its rows left this table: nothing is said about them"


def test_an_older_table_is_ignored(driver: Driver) -> None:
    driver.table(row("r0-w0"))
    driver.epoch = 0
    assert driver.table(launching("p0-w0"), plan=plan(add=JOINERS[:1])) == []


def test_a_superseded_plan_stops_and_its_joiner_is_adopted(driver: Driver) -> None:
    driver.say(published(0))
    driver.table(launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS))
    driver.say(ready("p0-w0"))
    sent = driver.table(launching("p0-w0"), inactive("p0-w1", generation=0), plan=plan("p2", add=JOINERS[:1]))
    assert named(sent) == [("Kill", "p0-w1")], "the one that is not wanted goes, the other is not started again"
    sent = driver.say(applied("p0-w0", 0))
    assert reports(sent) == [("p2", "prepared")]


@pytest.mark.parametrize("before", ["launch", "ready", "weights"])
def test_a_joiner_that_dies_while_preparing_fails_the_plan(driver: Driver, before: str) -> None:
    driver.say(published(0))
    driver.table(launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS))
    steps = {"launch": [], "ready": [ready("p0-w0")], "weights": [ready("p0-w0"), applied("p0-w0", 0)]}
    driver.say(*steps[before])
    (report,) = of(PlanProgress, driver.say(gone("p0-w0", reason="exit:7")))
    assert (report.report, report.failed_workers) == ("failed", ("p0-w0",))
    assert "exit:7" in report.reason
    assert driver.wait(RETRY_MS) == [], "nothing more is done for a failed plan, and it is reported once"
    sent = driver.table(inactive("p0-w0", generation=0), inactive("p0-w1", generation=0))
    assert named(sent) == [("Kill", "p0-w1")]
    driver.say(gone("p0-w1"))
    assert driver.wait(RETRY_MS) == []


def test_a_joiner_that_is_not_ready_in_time_fails_the_plan(driver: Driver) -> None:
    driver.say(published(0))
    driver.table(launching("p0-w0"), launching("p0-w1"), plan=plan(add=JOINERS))
    driver.say(ready("p0-w0"), applied("p0-w0", 0))
    assert reports(driver.wait(TIMES.prepare_ms - 1)) == []
    (report,) = of(PlanProgress, driver.wait(1))
    assert (report.report, report.failed_workers) == ("failed", ("p0-w1",))


def test_the_time_of_an_adopted_joiner_runs_from_its_launch(driver: Driver) -> None:
    driver.table(launching("p0-w0"), plan=plan(add=JOINERS[:1]))
    driver.wait(TIMES.prepare_ms - 10)
    driver.table(launching("p0-w0"), plan=plan("p2", add=JOINERS[:1]))
    assert reports(driver.wait(10)) == [("p2", "failed")]


def test_a_new_incarnation_is_launched_and_facts_of_the_old_one_are_ignored(driver: Driver) -> None:
    prepare(driver)
    driver.say(gone("p0-w0"))
    driver.table(inactive("p0-w0"), launching("p0-w1"))
    again = (assign("p0-w0", incarnation=2),)
    sent = driver.table(launching("p0-w0", incarnation=2), launching("p0-w1"), plan=plan("p2", add=again))
    assert [launch.incarnation for launch in of(Launch, sent)] == [2]
    assert driver.say(ready("p0-w0", 1), gone("p0-w0", 1)) == []
    assert named(driver.say(ready("p0-w0", 2))) == [("UpdateWeights", "p0-w0")]


def test_shrink_drain_then_kill_then_applied(driver: Driver) -> None:
    leaving = plan(stage="applying", remove=(leave("p0-w0"),))
    sent = driver.table(row("r0-w0"), draining("p0-w0"), plan=leaving)
    (drain,) = of(Drain, sent)
    assert (drain.worker, drain.role_generation) == ("p0-w0", 2)
    sent = driver.say(drained("p0-w0", 1))
    assert not of(Kill, sent), "that was the drain of an earlier generation"
    sent = driver.say(drained("p0-w0", 2))
    assert [(kill.worker, kill.incarnation) for kill in of(Kill, sent)] == [("p0-w0", 1)]
    assert [timing.operation for timing in of(OperationTimed, sent)] == ["drain"]
    assert named(driver.wait(RETRY_MS)) == [("Kill", "p0-w0")]
    assert reports(driver.say(gone("p0-w0"))) == [("p1", "applied")]


def test_a_leaver_that_does_not_drain_is_killed(driver: Driver) -> None:
    driver.table(draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0"),)))
    assert named(driver.wait(TIMES.drain_ms - 1)) == [("Drain", "p0-w0")]
    assert named(driver.wait(1)) == [("Kill", "p0-w0")]
    assert named(driver.wait(RETRY_MS)) == [("Kill", "p0-w0")], "and is not asked to drain again"


@pytest.mark.parametrize("notice_ms", [400, 1_000, 3_000, 100_000])
def test_a_return_deadline_is_kept_whatever_the_worker_does(driver: Driver, notice_ms: int) -> None:
    deadline_ms = START_MS + notice_ms
    sent = driver.table(draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0", deadline_ms),)))
    assert named(sent) == [("Drain", "p0-w0")]
    while not (kills := of(Kill, sent)):
        sent = driver.wait(50)
    assert driver.now_ms + kills[0].grace_ms <= deadline_ms
    assert driver.now_ms - START_MS >= min(notice_ms // 2, TIMES.drain_ms) - 50, "the drain gets its share"


def test_a_leaver_whose_gpus_are_gone_is_killed_at_once(driver: Driver) -> None:
    sent = driver.table(draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0", 0),)))
    (kill,) = sent
    assert isinstance(kill, Kill) and kill.grace_ms == 0


def test_a_leaver_on_a_lost_node_is_done_when_the_table_says_so(driver: Driver) -> None:
    leaving = plan(stage="applying", remove=(leave("p0-w0"),))
    driver.table(draining("p0-w0"), plan=leaving)
    assert reports(driver.table(inactive("p0-w0"), plan=leaving)) == [("p1", "applied")]


def test_a_role_changer_is_drained_then_given_the_admitted_generation(driver: Driver) -> None:
    change = assign("r0-w0", Role.DECODE, generation=3)
    sent = driver.table(switching("r0-w0"), plan=plan(stage="applying", reassign=(change,)))
    assert named(sent) == [("Drain", "r0-w0")]
    (order,) = of(SetRole, driver.say(drained("r0-w0", 2)))
    assert (order.role, order.role_generation) == (Role.DECODE, 3)
    assert named(driver.wait(RETRY_MS)) == [("SetRole", "r0-w0")]
    assert reports(driver.say(role_set("r0-w0", 3, Role.DECODE))) == [("p1", "applied")]


def test_a_role_changer_that_dies_does_not_hold_the_plan_up(driver: Driver) -> None:
    change = assign("r0-w0", Role.DECODE, generation=3)
    driver.table(switching("r0-w0"), plan=plan(stage="applying", reassign=(change,)))
    assert reports(driver.say(gone("r0-w0"))) == [("p1", "applied")]


def test_a_role_changer_that_does_not_drain_is_killed(driver: Driver) -> None:
    change = assign("r0-w0", Role.DECODE, generation=3)
    driver.table(switching("r0-w0"), plan=plan(stage="applying", reassign=(change,)))
    assert named(driver.wait(TIMES.drain_ms)) == [("Kill", "r0-w0")]


def test_joiners_follow_new_versions_until_the_admit_epoch(driver: Driver) -> None:
    prepare(driver)
    assert named(driver.say(published(1))) == [("UpdateWeights", "p0-w0"), ("UpdateWeights", "p0-w1")]
    applying = plan(stage="applying", add=JOINERS)
    assert driver.table(launching("p0-w0"), launching("p0-w1"), plan=applying) == []
    assert named(driver.say(applied("p0-w0", 1))[-1:]) == [("SetRole", "p0-w0")]
    driver.say(applied("p0-w1", 1), role_set("p0-w0", 1))
    assert reports(driver.say(role_set("p0-w1", 1))) == [("p1", "applied")]
    sent = driver.say(published(2))
    assert named(sent) == [("UpdateWeights", "p0-w0"), ("UpdateWeights", "p0-w1")], "not admitted yet"
    driver.table(row("p0-w0"), row("p0-w1"))
    assert driver.say(published(3)) == [], "admitted workers are the pipeline scheduler's"


def test_a_joiner_that_dies_while_applying_is_reported(driver: Driver) -> None:
    prepare(driver)
    driver.table(launching("p0-w0"), launching("p0-w1"), plan=plan(stage="applying", add=JOINERS))
    assert reports(driver.say(gone("p0-w1"))) == [("p1", "failed")]


def test_leavers_are_returned_even_when_the_plan_has_failed(driver: Driver) -> None:
    prepare(driver)
    applying = plan(stage="applying", add=JOINERS, remove=(leave("r0-w0"),))
    driver.table(draining("r0-w0"), launching("p0-w0"), launching("p0-w1"), plan=applying)
    driver.say(gone("p0-w1"))
    assert named(driver.say(drained("r0-w0")), Kill) == [("Kill", "r0-w0")]


def test_a_part_without_joiners_is_prepared_at_once_and_one_without_anything_is_silent(driver: Driver) -> None:
    overlap = (assign("t0-w0"),)
    both = plan(add=overlap, remove=(leave("r0-w0"),))
    assert reports(driver.table(row("r0-w0"), launching("t0-w0"), plan=both)) == [("p1", "prepared")]
    assert driver.table(row("r0-w0"), launching("t0-w0"), plan=plan("p2", add=overlap)) == []


def test_an_active_worker_drained_for_a_plan_that_was_rolled_back_gets_its_role_again(driver: Driver) -> None:
    driver.say(ready("r0-w0"), role_set("r0-w0", 1))
    driver.table(row("r0-w0"))
    assert driver.wait(RETRY_MS) == []
    (order,) = of(SetRole, driver.table(row("r0-w0", generation=3)))
    assert (order.role, order.role_generation) == (Role.COLOCATED, 3)


def test_no_process_newer_than_the_table_is_killed(driver: Driver) -> None:
    driver.say(ready("p0-w0", 2))
    assert driver.table(inactive("p0-w0", incarnation=1)) == []
    assert named(driver.table(inactive("p0-w0", incarnation=2))) == [("Kill", "p0-w0")]


def test_after_a_restart_it_goes_on_where_it_was(driver: Driver) -> None:
    prepare(driver)
    driver.restart()
    applying = plan(stage="applying", add=JOINERS)
    assert len(of(SetRole, driver.table(launching("p0-w0"), launching("p0-w1"), plan=applying))) == 2
    driver.restart()
    assert reports(driver.say(role_set("p0-w0", 1), role_set("p0-w1", 1))) == [("p1", "applied")]
    driver.restart()
    assert driver.say(role_set("p0-w1", 1)) == []


def test_repeating_any_input_is_harmless(driver: Driver) -> None:
    prepare(driver)
    before = driver.state
    assert driver.say(ready("p0-w0"), applied("p0-w0", 0), published(0), ready("p0-w1")) == []
    assert driver.state == before


def test_nonsense_is_refused_and_changes_nothing(driver: Driver) -> None:
    before = driver.state
    assert driver.say(ready("zz-w0"), "?", NodeUp(node=NodeId("zz"), gpus=(), agent_incarnation=1, host="h")) == []
    assert len(driver.refusals) == 3
    assert driver.state == before
    driver.say(gone("t0-t0"), ready("t0-w0"))
    assert len(driver.refusals) == 3, "other zones' workers are the toggle manager's"
    assert not [entry for entry in driver.state.workers if entry.worker.startswith("t")]


def test_activity_is_read_from_the_row_not_guessed(driver: Driver) -> None:
    driver.say(ready("p0-w0"))
    assert driver.table(row("p0-w0", Activity.UNKNOWN)) == []
