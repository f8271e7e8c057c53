"""Section 4.1.2 (and 4.3.2, 4.4 where they are about the whole): one test a claim, on every service's real code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from messages.decision_engine import BudgetChanged, WorkloadProfile
from messages.elastic_scheduler import GpuAvailable, GpuReclaimed, TrainingBegin, TrainingFinished
from messages.envelope import Message
from messages.executors import ReconfigurationPlan
from messages.monitor import DecisionRecord
from messages.orchestrator import PlanProgress, TargetConfiguration
from messages.rollout_worker import SetRole
from services.simulator.faults.cluster import Cluster, small_job
from services.simulator.faults.record import Sent, Stored, TableSeen


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(small_job(steps=6, toggle_guess_s=0.001), seed=3) as made:
        made.run_until(lambda: made.settled and len(made.roles) >= 2, what="rollout serves")
        yield made


def after(cluster: Cluster, since: int, *kinds: type[Message]) -> list[Message]:
    return [
        seen.message
        for seen in cluster.record[since:]
        if isinstance(seen, (Stored, Sent)) and isinstance(seen.message, kinds)
    ]


def test_all_elastic_events_traverse_the_same_four_stages(cluster: Cluster) -> None:
    """ "Training notifications and preemptible-GPU changes traverse the same four stages": budget, decision, plan, execution,
    each made from the one before it and from nothing else."""
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles)
    cluster.reclaimed("s0", 0, notice_ms=1_000)
    cluster.run_until(lambda: cluster.trained >= 1, 60_000)

    causes = " ".join(budget.cause for budget in cluster.events(BudgetChanged))
    for event in ("gpu.available", "gpu.reclaimed", "training.begin", "training.finished"):
        assert event in causes
    for kind in (GpuAvailable, GpuReclaimed, TrainingBegin, TrainingFinished):
        assert cluster.events(kind)
    budgets = {budget.budget_id for budget in cluster.events(BudgetChanged)}
    targets = cluster.events(TargetConfiguration)
    assert {target.budget_id for target in targets} == budgets, "every budget is answered"
    decisions = {target.decision_id for target in targets}
    plans = cluster.events(ReconfigurationPlan)
    assert plans and {plan.decision_id for plan in plans} <= decisions
    reported = {report.plan_id for report in cluster.events(PlanProgress)}
    assert reported <= {plan.plan_id for plan in plans}, "executors work on plans only"


def test_the_workload_decides_what_added_resources_become_not_their_source(cluster: Cluster) -> None:
    """ "The workload, not the GPU source, decides": one target speaks of lent and of preemptible GPUs alike."""
    cluster.available("s0", 0, 1)
    cluster.run_until(
        lambda: any(target.borrow and "s0-w0" in target.usable for target in cluster.events(TargetConfiguration)),
        60_000,
        what="both kinds in one target",
    )
    target = next(t for t in cluster.events(TargetConfiguration) if t.borrow and "s0-w0" in t.usable)
    zones = {worker.partition("-")[0] for worker in target.usable}
    assert {"r0", "s0", "t0"} <= zones
    assert target.prefill + target.decode + target.colocated <= len(target.usable)


def test_returning_is_mandatory_and_growth_is_not(cluster: Cluster) -> None:
    """ "Returning borrowed GPUs is mandatory ... while borrowing and expansion are optional": every budget that takes
    something says so with a deadline, and none that gives something does."""
    cluster.available("s0", 0)
    cluster.run_until(lambda: cluster.settled and "s0-w0" in cluster.roles)
    cluster.reclaimed("s0", 0, notice_ms=1_000)
    cluster.run_until(lambda: cluster.trained >= 1, 60_000)
    for budget in cluster.events(BudgetChanged):
        if "training.begin" in budget.cause:
            assert {leave.worker for leave in budget.leaving} >= {"t0-w0"} and not budget.overlap
        if "gpu.reclaimed" in budget.cause:
            (leave,) = [leave for leave in budget.leaving if leave.worker == "s0-w0"]
            assert leave.deadline_ms > 0
        assert not {leave.worker for leave in budget.leaving} & set(budget.dedicated)


def test_4_3_2_parameters_are_refitted_after_each_step_and_decided_with(cluster: Cluster) -> None:
    """ "After each rollout step, the Runtime Tracker refits the makespan-model parameters ... from request telemetry"."""
    cluster.run_until(lambda: cluster.trained >= 2, 60_000)
    profiles = cluster.events(WorkloadProfile)
    assert [profile.train_step for profile in profiles] == sorted({profile.train_step for profile in profiles})
    assert len(profiles) >= 2 and profiles[0].samples > 0
    # A step whose batch was complete before the step began has no turn of its own.
    assert sum(profile.samples for profile in profiles) > profiles[0].samples
    used = {record.train_step for record in cluster.events(DecisionRecord)}
    assert used & {profile.train_step for profile in profiles}, "decisions are made with what was fitted"


def test_4_4_router_executors_and_schedulers_share_one_view(cluster: Cluster) -> None:
    """ "A unified GPU-worker-role state": all that watch the table come to the same epoch, and none sees another first."""
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles)
    epoch = cluster.table.epoch
    cluster.run(100)
    newest: dict[str, int] = {}
    for seen in cluster.record:
        if isinstance(seen, TableSeen):
            newest[seen.actor] = seen.epoch
    watchers = {"router-0", "router-1", "agent-0", "cluster_rebuilder", "toggle_manager", "pipeline_scheduler"}
    assert watchers <= set(newest)
    assert all(newest[watcher] >= epoch for watcher in watchers)


def test_4_5_new_workers_enter_in_the_roles_that_the_decision_gave_them(cluster: Cluster) -> None:
    """The executors' commands carry the plan's roles; no executor chooses one."""
    since = len(cluster.record)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and "s0-w1" in cluster.roles)
    planned = {
        (entry.worker, entry.role)
        for plan in after(cluster, since, ReconfigurationPlan)
        if isinstance(plan, ReconfigurationPlan)
        for entry in (*plan.add, *plan.reassign)
    }
    given = {
        (command.worker, command.role) for command in after(cluster, since, SetRole) if isinstance(command, SetRole)
    }
    assert given and given <= planned
