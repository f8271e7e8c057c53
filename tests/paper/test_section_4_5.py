"""Section 4.5 of the paper: what the Inter-Scale Cluster Rebuilder promises, one test a claim."""

from __future__ import annotations

import pytest

from messages.ids import Stage
from messages.node_agent import Kill, Launch
from messages.orchestrator import PlanProgress
from messages.rollout_worker import Drain, SetRole, UpdateWeights
from services.cluster_rebuilder.config import Config
from services.cluster_rebuilder.core import ClusterRebuilderCore
from tests.unit.executing import (
    JOB,
    START_MS,
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
)

GROUP = (assign("p0-w0"), assign("p0-w1"))
SERVING = (row("r0-w0"), row("r0-w1"))
JOINING = (launching("p0-w0"), launching("p0-w1"))


@pytest.fixture
def driver() -> Driver:
    return Driver(ClusterRebuilderCore(Config.of(JOB)))


def to(worker: str, messages: list[object]) -> list[object]:
    return [message for message in messages if getattr(message, "worker", "") == worker]


def test_a_shrink_interrupts_only_the_affected_workers(driver: Driver) -> None:
    """ "Stops dispatching new requests to the affected workers, interrupts unfinished requests ... without interrupting
    rollout on other workers": Drain ends requests as interrupted, with their tokens; nobody else hears anything."""
    sent = driver.table(*SERVING, draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0"),)))
    sent += driver.say(drained("p0-w0"), gone("p0-w0"))
    assert named(sent, Drain, Kill) == [("Drain", "p0-w0"), ("Kill", "p0-w0")]
    assert not to("r0-w0", sent) and not to("r0-w1", sent)


def test_a_shrink_keeps_partial_trajectories_before_the_process_ends(driver: Driver) -> None:
    """ "Interrupts unfinished requests while retaining partial trajectories": no kill before the drain is answered."""
    sent = driver.table(*SERVING, draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0"),)))
    sent += driver.wait(1_000)
    assert not of(Kill, sent)
    assert of(Kill, driver.say(drained("p0-w0")))


def test_a_shrink_returns_the_gpus_synchronously(driver: Driver) -> None:
    """ "Returns the GPUs synchronously": the part is applied when the process has ended, and not before."""
    sent = driver.table(draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0"),)))
    sent += driver.say(drained("p0-w0"))
    assert reports(sent) == []
    assert reports(driver.say(gone("p0-w0"))) == [("p1", "applied")]


def test_reclaimed_gpus_are_returned_promptly_whatever_the_worker_does(driver: Driver) -> None:
    """ "Shrinking is cheap and urgent: reclaimed GPUs must be returned promptly"."""
    deadline_ms = START_MS + 2_000
    sent = driver.table(draining("p0-w0"), plan=plan(stage="applying", remove=(leave("p0-w0", deadline_ms),)))
    while not of(Kill, sent):
        sent = driver.wait(100)
    assert driver.now_ms + of(Kill, sent)[0].grace_ms <= deadline_ms


def test_an_expansion_prepares_in_the_background(driver: Driver) -> None:
    """ "New workers initialize in the background while existing workers continue serving"."""
    driver.say(published(0))
    sent = driver.table(*SERVING, *JOINING, plan=plan(add=GROUP))
    sent += driver.say(ready("p0-w0"), ready("p0-w1"), applied("p0-w0", 0), applied("p0-w1", 0))
    sent += driver.wait(5_000)
    assert not to("r0-w0", sent) and not to("r0-w1", sent)


def test_weights_are_propagated_lazily(driver: Driver) -> None:
    """ "Maintains the latest available weight snapshot and synchronizes new workers only after they initialize":
    of the versions published while a worker starts, it gets the last one only."""
    driver.table(*SERVING, launching("p0-w0"), plan=plan(add=GROUP[:1]))
    sent = driver.say(published(3), published(4), published(5))
    assert not of(UpdateWeights, sent)
    sent = driver.say(ready("p0-w0"))
    assert [update.version for update in of(UpdateWeights, sent)] == [5]


def test_the_whole_group_is_finalised_at_once(driver: Driver) -> None:
    """ "Once all added workers have finished initialization, weight synchronization, and runtime preparation, the
    Rebuilder applies atomic finalization to admit the entire group at once"."""
    driver.say(published(0))
    driver.table(*SERVING, *JOINING, plan=plan(add=GROUP))
    sent = driver.say(ready("p0-w0"), applied("p0-w0", 0), ready("p0-w1"))
    assert not reports(sent) and not of(SetRole, sent), "one is ready, the group is not"
    assert reports(driver.say(applied("p0-w1", 0))) == [("p1", "prepared")]
    sent = driver.table(*SERVING, *JOINING, plan=plan(stage="applying", add=GROUP))
    sent += driver.say(role_set("p0-w0", 1))
    assert not reports(sent)
    assert reports(driver.say(role_set("p0-w1", 1))) == [("p1", "applied")]


def test_finalisation_does_not_touch_requests_already_executing(driver: Driver) -> None:
    """ "Pauses admission of new requests briefly but does not block requests already executing"."""
    driver.say(published(0))
    driver.table(*SERVING, *JOINING, plan=plan(add=GROUP))
    driver.say(ready("p0-w0"), ready("p0-w1"), applied("p0-w0", 0), applied("p0-w1", 0))
    prepared = tuple(launching(worker) for worker in ("p0-w0", "p0-w1"))
    assert {each.stage for each in prepared} == {Stage.LAUNCHING}
    sent = driver.table(*SERVING, *prepared, plan=plan(stage="applying", add=GROUP))
    assert not of(Drain, sent)
    assert not to("r0-w0", sent) and not to("r0-w1", sent)


def test_admission_is_all_or_nothing(driver: Driver) -> None:
    """ "Cancels the whole expansion if any worker fails to initialize": one failure fails the plan; no worker of the
    group is ever given a role, and the survivors are ended with the group."""
    driver.say(published(0))
    sent = driver.table(*SERVING, *JOINING, plan=plan(add=GROUP))
    assert len(of(Launch, sent)) == 2
    sent = driver.say(ready("p0-w0"), applied("p0-w0", 0), gone("p0-w1"))
    assert [report.report for report in of(PlanProgress, sent)] == ["failed"]
    sent += driver.table(*SERVING, inactive("p0-w0", generation=0), inactive("p0-w1", generation=0))
    assert named(sent, Kill, SetRole) == [("Kill", "p0-w0")]
