"""Counts of lending: from the events alone, each return and each plan once."""

from __future__ import annotations

from messages.envelope import Message
from messages.executors import Assign, ReconfigurationPlan
from messages.ids import DecisionId, Epoch, Incarnation, PlanId, PolicyVersion, Role, RoleGeneration, WorkerId
from messages.monitor import GpusReturned
from messages.orchestrator import PlanProgress, WeightsApplied, WorkerReleased
from messages.toggle_manager import TrainerReleased, TrainerResumed
from services.monitor.lending import Moved, lending_of

OVERLAP = ("t0-w0",)


def plan(name: str, stage: str, worker: str) -> ReconfigurationPlan:
    return ReconfigurationPlan(
        plan_id=PlanId(name),
        decision_id=DecisionId("d1"),
        stage=stage,
        epoch=Epoch(1),
        add=(Assign(WorkerId(worker), Role.COLOCATED, Incarnation(1), RoleGeneration(1)),),
        remove=(),
        reassign=(),
        deadline_ms=0,
    )


def returned(batch: int, deadline_ms: int, at_ms: int) -> GpusReturned:
    return GpusReturned(batch=batch, workers=(WorkerId("t0-w0"),), deadline_ms=deadline_ms, at_ms=at_ms)


def test_borrows_are_plans_that_were_applied() -> None:
    events: list[Message] = [
        plan("p1", "preparing", "t0-w0"),
        plan("p1", "applying", "t0-w0"),
        plan("p2", "preparing", "t0-w0"),
    ]
    events.insert(2, PlanProgress(plan_id=PlanId("p1"), part="toggle", report="applied"))
    found = lending_of([*events, plan("p3", "applying", "s0-w0")], OVERLAP)
    assert (found.count, found.returns, found.late_returns) == (1, 0, 0)


def test_a_return_is_late_after_its_deadline_and_counted_once() -> None:
    found = lending_of([returned(0, 100, 100), returned(1, 200, 201), returned(1, 200, 201)], OVERLAP)
    assert (found.returns, found.borrows["late_returns"]) == (2, 1)


def test_memory_is_the_mean_of_what_was_moved() -> None:
    released = {"worker": WorkerId("t0-w0"), "incarnation": Incarnation(1), "role_generation": RoleGeneration(1)}
    applied = {"worker": WorkerId("t0-w0"), "incarnation": Incarnation(1)}
    events: list[Message] = [
        TrainerReleased(epoch=Epoch(1), freed_bytes=100, took_ms=1),
        TrainerReleased(epoch=Epoch(2), freed_bytes=0, took_ms=0),
        TrainerResumed(epoch=Epoch(3), batch=0, restored_bytes=90, took_ms=1),
        WorkerReleased(**released, freed_bytes=30, took_ms=1),
        WorkerReleased(**released, freed_bytes=50, took_ms=1),
        WeightsApplied(**applied, version=PolicyVersion(1), restored_bytes=44),
        WeightsApplied(**applied, version=PolicyVersion(2)),
    ]
    memory = lending_of(events, OVERLAP).memory
    assert memory["trainer"] == Moved(releases=1, freed_bytes=100, restores=1, restored_bytes=90)
    assert memory["workers"] == Moved(releases=2, freed_bytes=40, restores=1, restored_bytes=44)
