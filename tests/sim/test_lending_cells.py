"""Lending with something going wrong in each stage: a table of stages and of what goes wrong, a test for each cell.

Whatever comes when, training then gets its GPUs by its deadline and trains, the cluster ends at the target, no GPU was held
by two phases at any moment (checked after everything that happens), the invariants of each epoch held (asserted by the
orchestrator's core), and workers whom nothing of it concerned heard nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from messages.ids import Activity, Residency, Stage, Zone
from messages.monitor import GpusReturned
from messages.node_agent import Kill, Launch
from messages.rollout_worker import Activate, Deactivate, Drain, SetRole
from tests.sim.cluster import Cluster, lending_job

T = ("t0-w0", "t0-w1")
LIFECYCLE = (Launch, Kill, Drain, SetRole, Activate, Deactivate)
LENT = {"r0-w0": "colocated", "r0-w1": "colocated", "t0-w0": "colocated", "t0-w1": "colocated"}

Setup = Callable[[Cluster], None]


def is_applying(cluster: Cluster) -> bool:
    return cluster.table.plan is not None and cluster.table.plan.stage == "applying"


def begin_borrow(cluster: Cluster) -> None:
    cluster.wish(borrow=True)


def lent(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: cluster.settled and cluster.roles == LENT, what="lent")


def idle(cluster: Cluster) -> None:
    pass


def planned(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: cluster.table.plan is not None and bool(cluster.table.plan.add))


def releasing(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: Residency.RELEASING in cluster.residencies)


def released(cluster: Cluster) -> None:
    """The trainer's memory is free; the table says so, or is about to."""
    begin_borrow(cluster)
    cluster.run_until(lambda: not cluster.trainer.resident)


def activating(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: cluster.worker(T[0]).state.busy == "restore")


def loading(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: cluster.worker(T[0]).state.loading is not None)


def prepared(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: cluster.row(T[0]).stage is Stage.PREPARED)


def applying(cluster: Cluster) -> None:
    begin_borrow(cluster)
    cluster.run_until(lambda: is_applying(cluster))


def role_set(cluster: Cluster) -> None:
    """One of the joiners serves its role already, though not yet visibly."""
    begin_borrow(cluster)
    cluster.run_until(lambda: any(cluster.worker(worker).state.serving for worker in T))


def role_change(cluster: Cluster) -> None:
    """Lent workers are changing role along with reserved ones."""
    lent(cluster)
    cluster.wish(borrow=True, prefill=2, decode=2)
    cluster.run_until(
        lambda: is_applying(cluster) and any(cluster.row(worker).stage is Stage.SWITCHING for worker in T)
    )


def voluntary_return(cluster: Cluster) -> None:
    """Not training wants them back, the decision engine does not want them any more."""
    lent(cluster)
    cluster.wish()
    cluster.run_until(lambda: Residency.DRAINING in cluster.residencies)


def deactivating(cluster: Cluster) -> None:
    lent(cluster)
    cluster.wish()
    cluster.run_until(lambda: cluster.worker(T[0]).state.busy == "release")


def given_back(cluster: Cluster) -> None:
    """Free, and nobody's."""
    lent(cluster)
    cluster.wish()
    cluster.run_until(lambda: cluster.residencies == {Residency.FREE} and cluster.settled)


def growth_preparing(cluster: Cluster) -> None:
    """Spot workers are launched while training's GPUs are lent."""
    lent(cluster)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.row("s0-w0").stage is Stage.LAUNCHING)


def growth_applying(cluster: Cluster) -> None:
    lent(cluster)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: is_applying(cluster) and cluster.row("s0-w0").stage is Stage.PREPARED)


def joint_preparing(cluster: Cluster) -> None:
    """One plan adds spot workers and lent ones."""
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.decisions is not None and bool(cluster.decisions.budget))
    cluster.run_until(lambda: len(cluster.decisions.budget.dedicated) == 4)  # type: ignore[union-attr]
    begin_borrow(cluster)
    cluster.run_until(
        lambda: cluster.row("s0-w0").stage is Stage.LAUNCHING and cluster.row(T[0]).stage is not Stage.NONE
    )


def joint_applying(cluster: Cluster) -> None:
    joint_preparing(cluster)
    cluster.run_until(lambda: is_applying(cluster))


def shrink(cluster: Cluster) -> None:
    """A reserved worker that is slow to drain holds up the plan in progress."""
    lent(cluster)
    cluster.available("s0", 0, 1)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 6)
    cluster.worker("s0-w0").stuck.add("drain")
    cluster.reclaimed("s0", 0, notice_ms=2_500)
    cluster.run_until(lambda: cluster.row("s0-w0").stage is Stage.DRAINING)


def training_asked(cluster: Cluster) -> None:
    lent(cluster)
    cluster.pipeline.begin()
    cluster.run_until(lambda: Residency.DRAINING in cluster.residencies)


def training(cluster: Cluster) -> None:
    lent(cluster)
    cluster.pipeline.begin()
    cluster.run_until(lambda: cluster.table.training_batch is not None)


STAGES: tuple[Setup, ...] = (
    idle, planned, releasing, released, activating, loading, prepared, applying, role_set, lent, role_change,
    voluntary_return, deactivating, given_back, growth_preparing, growth_applying, joint_preparing, joint_applying, shrink,
    training_asked, training,
)  # fmt: skip


def training_begins(cluster: Cluster) -> None:
    if cluster.pipeline.begun is None:
        cluster.pipeline.begin()


def worker_killed(cluster: Cluster) -> None:
    cluster.worker(T[0]).die()


def worker_hangs(cluster: Cluster) -> None:
    """It answers nothing any more, and ignores SIGTERM."""
    process = cluster.worker(T[0])
    process.stuck |= {"all", "load", "drain", "role", "release", "restore"}
    process.stubborn = True


def trainer_killed(cluster: Cluster) -> None:
    cluster.trainer.die()


def trainer_hangs(cluster: Cluster) -> None:
    process = cluster.trainer
    process.stuck |= {"all", "release", "resume", "train"}
    process.stubborn = True


def reserved_worker_killed(cluster: Cluster) -> None:
    cluster.worker("r0-w0").die()


def restart_of(name: str) -> Setup:
    def restart(cluster: Cluster) -> None:
        cluster.world.actors[name].restart()

    restart.__name__ = f"{name}_restarted"
    return restart


def everything_restarted(cluster: Cluster) -> None:
    for name, actor in cluster.world.actors.items():
        if name not in ("pipeline_scheduler", "decision_engine"):
            actor.restart()


WRONG: tuple[Setup, ...] = (
    training_begins, worker_killed, worker_hangs, trainer_killed, trainer_hangs, reserved_worker_killed,
    *(
        restart_of(name)
        for name in ("toggle_manager", "cluster_rebuilder", "orchestrator", "elastic_scheduler", "node_agent-t0")
    ),
    everything_restarted,
)  # fmt: skip


def cluster_of(seed: int) -> Cluster:
    cluster = Cluster(lending_job(training=2), seed=seed)
    cluster.run_until(lambda: cluster.settled and len(cluster.roles) == 2, what="the reserved workers serve")
    cluster.run_until(lambda: all(cluster.row(worker).ready for worker in T), what="the overlap processes are up")
    return cluster


def name_of(value: Setup) -> str:
    return value.__name__


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_cell(stage: Setup, wrong: Setup) -> None:
    cluster = cluster_of(seed=STAGES.index(stage) * 100 + WRONG.index(wrong))
    before = len(cluster.world.commands)
    stage(cluster)
    wrong(cluster)
    asked_in_time(cluster)
    cluster.wish()
    cluster.run_until(lambda: cluster.settled and cluster.pipeline.begun is None, 20_000, what="it settles")
    assert not cluster.world.refusals
    again(cluster)
    untouched(cluster, stage, wrong, before)


def asked_in_time(cluster: Cluster) -> None:
    """Training asks, unless it has, and has its GPUs by the deadline whatever happened."""
    if cluster.pipeline.begun is None:
        cluster.run(cluster.world.random.choice((0, 20, 100, 400)))
        cluster.pipeline.begin()
    batch = cluster.pipeline.begun
    assert batch is not None
    cluster.run_until(lambda: cluster.table.training_batch == batch, 20_000, what="training gets its GPUs")
    since_ms = cluster.table.training_since_ms
    held = [pair.deadline_ms for pair in cluster.table.pairs if pair.deadline_ms]
    assert all(since_ms <= deadline for deadline in held), f"late by {since_ms - min(held)} ms"
    cluster.run_until(lambda: cluster.pipeline.trained > batch, 40_000, what="the batch is trained")
    late = [returned for returned in cluster.world.of(GpusReturned) if returned.at_ms > returned.deadline_ms]
    assert not late
    if held:
        assert cluster.world.of(GpusReturned)[-1].batch == batch


def again(cluster: Cluster) -> None:
    """What happened left nothing behind: the same GPUs are lent and returned once more."""
    cluster.wish(borrow=True)
    cluster.run_until(lambda: cluster.settled and set(T) <= cluster.roles.keys(), 30_000, what="lent once more")
    assert cluster.residencies == {Residency.ROLLOUT}
    asked_in_time(cluster)
    cluster.wish()
    cluster.run_until(lambda: cluster.settled, 10_000, what="it settles again")
    assert all(row.activity is Activity.INACTIVE for row in cluster.table.rows if row.zone is Zone.OVERLAP)


def untouched(cluster: Cluster, stage: Setup, wrong: Setup, before: int) -> None:
    """Reserved workers that neither died nor changed role were never told anything but new weights."""
    if stage is role_change:
        return
    for worker in ("r0-w0", "r0-w1"):
        if worker == "r0-w0" and wrong is reserved_worker_killed:
            continue
        assert not cluster.commands_to(worker, *LIFECYCLE, since=before)
        assert cluster.row(worker).role_generation == 1 and cluster.row(worker).incarnation == 1
